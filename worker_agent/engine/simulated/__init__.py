"""An engine with the timing and messages of a real one that computes nothing."""

from worker_agent.engine.simulated.engine import SimulatedEngine
from worker_agent.engine.simulated.settings import Faults, SimulatedSettings

__all__ = ["Faults", "SimulatedEngine", "SimulatedSettings"]
