"""An engine that takes an engine's time and bytes, and computes nothing."""

from worker_agent.engine.simulated.engine import SimulatedEngine
from worker_agent.engine.simulated.settings import Faults, SimulatedSettings

__all__ = ["Faults", "SimulatedEngine", "SimulatedSettings"]
