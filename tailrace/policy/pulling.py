"""Pull a cached prefix from another instance if the transfer takes less time than the prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tailrace.actions import Place, Placement
from tailrace.cluster import Arrival, ClusterView, InstanceState, InstanceView
from tailrace.perf.steps import StepModel, held_tokens, load_s
from tailrace.policy.parameters import parameter
from tailrace.profiles import Profile


def pulls_parameter(source: str) -> bool:
    """Declare the parameter `pulls`; `source` says whose default it is."""
    return parameter(
        False,
        "whether an arrival's prefix is pulled to its instance from another one that holds it, if that takes "
        "less time than computing it",
        source=source,
    )


PULLS: Final = pulls_parameter("false: the paper, which has no prefix cache; true: ours")
# Assumed where no transfer has been measured: the time to open one, and a link of 100 Gbit/s.
_OPEN_S: Final = 0.01
_LINK_BYTES_PER_S: Final = 12.5e9

Pull = Callable[[ClusterView, Arrival, Placement], Placement]


def pulling(profile: Profile | None, pulls: bool) -> Pull:
    """Return a function that adds a pull to a policy's placement if it pays; the identity unless `pulls`.

    `profile`: as in `StepModel.of_profile`.
    """
    return _Pulling(StepModel.of_profile(profile)).add_pull if pulls else _unchanged


def _unchanged(view: ClusterView, arrival: Arrival, placement: Placement) -> Placement:
    return placement


class _Pulling:
    def __init__(self, nominal: StepModel) -> None:
        self._nominal = nominal

    def add_pull(self, view: ClusterView, arrival: Arrival, placement: Placement) -> Placement:
        """Return the same placement, with a pull of the prefix if that saves time."""
        if not arrival.cached or not isinstance(placement, Place):
            return placement
        instance = view.instances[placement.instance_id]
        holder = most_cached(arrival, tuple(view.instances.values()))
        if holder is None or not self._pays(instance, arrival, arrival.reported_tokens(holder)):
            return placement
        return Place(placement.instance_id, placement.also, holder)

    def _pays(self, instance: InstanceView, arrival: Arrival, held: int) -> bool:
        device, total, _ = arrival.held_on(instance.instance_id)
        if held <= total:
            return False
        steps = self._nominal if instance.measured is None else instance.measured.steps
        nominal_s = _OPEN_S + (held - total) * steps.kv_bytes_per_token / _LINK_BYTES_PER_S
        transfer_s = pull_s(instance, held - total, _OPEN_S, nominal_s) + load_s(steps, total - device)
        return steps.compute_s(held) - steps.compute_s(held_tokens(steps, device, total)) >= transfer_s


def most_cached(arrival: Arrival, instances: Sequence[InstanceView]) -> str | None:
    """Return the instance that has reported the longest cached prefix of the arrival; the first of equals.

    Draining instances count, since they can still send KV; suspect ones and those that the front end cannot
    reach do not. None: no instance has reported any.
    """
    least, holder = 0, None
    for instance in instances:
        held = arrival.cached.get(instance.instance_id)
        if held is None or held.reported <= least or instance.state is InstanceState.SUSPECT:
            continue
        # Front ends also exclude draining instances, which they do reach.
        if instance.state is InstanceState.DRAINING or instance.instance_id not in arrival.excluded:
            least, holder = held.reported, instance.instance_id
    return holder


def pull_s(instance: InstanceView, tokens: int, open_s: float, nominal_s: float) -> float:
    """Return the seconds to transfer the KV of `tokens` to an instance: `open_s` plus the copy at its
    recently measured rate; `nominal_s` if none was measured."""
    rate = instance.migration_tokens_per_s
    return nominal_s if rate is None or rate <= 0.0 else open_s + tokens / rate
