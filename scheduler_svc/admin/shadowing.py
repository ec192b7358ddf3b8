"""The admin API's calls about the shadow policy."""

from __future__ import annotations

from scheduler_svc.admin.validation import format_parameters, policy_record
from scheduler_svc.metrics import SchedulerMetrics
from tailrace.control.guard import PolicyGuard
from tailrace.control.live import LiveControl
from tailrace.control.runner import DecisionPoint
from tailrace.control.shadow import Comparison, Shadow, Verdict
from tailrace.records import PolicyRecord
from tailrace.v1 import admin_pb2


class Shadowing:
    """Set and report this scheduler's shadow policy; it ends with the scheduler's leadership."""

    def __init__(self, control: LiveControl, metrics: SchedulerMetrics, guard: PolicyGuard) -> None:
        """`guard`: the one of the policy in force; each shadow policy has one of its own."""
        self._control = control
        self._metrics = metrics
        self._guard = guard

    def set(self, request: admin_pb2.SetShadowRequest) -> str:
        """Replace the shadow policy; return the name of the previous one, "" if there was none. Raise
        AdminError."""
        before = self._control.shadow
        shadow: Shadow | None = None
        if request.name:
            policy_request = admin_pb2.SetPolicyRequest(
                name=request.name, parameters=dict(request.parameters)
            )
            slo, name = self._control.active.slo, request.name
            with self._guard.loading(PolicyRecord(name=name)):
                record = policy_record(policy_request, slo)

            def count(compared: Comparison) -> None:
                labels = compared.policy, name, compared.point.value, compared.verdict.value
                self._metrics.shadow_decisions.labels(*labels).inc()

            with self._guard.loading(record):
                shadow = Shadow(record, slo, count, self._guard.another())
        self._control.follow_shadow(shadow)
        return "" if before is None else before.active.record.name

    def end(self) -> None:
        """End the shadow policy: this scheduler does not lead any more."""
        self._control.follow_shadow(None)

    def message(self) -> admin_pb2.Shadow:
        """Return the shadow policy with its counts."""
        shadow = self._control.shadow
        if shadow is None:
            return admin_pb2.Shadow(policy=self._control.active.name)
        counts = shadow.counts
        return admin_pb2.Shadow(
            name=shadow.active.record.name,
            parameters=format_parameters(shadow.active.record.parameters),
            policy=self._control.active.name,
            suspended=shadow.suspended,
            counts=[
                admin_pb2.ShadowCount(
                    point=point.value,
                    same=counts[point, Verdict.SAME],
                    different=counts[point, Verdict.DIFFERENT],
                    failed=counts[point, Verdict.FAILED],
                )
                for point in DecisionPoint
                if any(counts[point, verdict] for verdict in Verdict)
            ],
        )
