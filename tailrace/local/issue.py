"""Issue the certificates of a local cluster. A separate file, since using them needs no signing library."""

from __future__ import annotations

from pathlib import Path

from tailrace.local.certificates import ETCD_ROOT, OPERATOR
from tailrace.local.plan import Plan
from tailrace.local.ports import LOOPBACK
from tailrace.security.authority import Authority
from tailrace.security.roles import Identity, Role


def issue_certificates(plan: Plan) -> None:
    """Create an authority, and issue certificates for each part, the operator and etcd's root user."""
    if not plan.certificates:
        return
    authority = Authority.create(Path(plan.certificates))
    for part in plan.parts:
        authority.issue(Identity(Role(part.role), part.name), hosts=[LOOPBACK])
    for identity in (OPERATOR, ETCD_ROOT):
        authority.issue(identity)
