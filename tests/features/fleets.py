"""A fleet of two workers with the arguments that a feature needs, for workers and API server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
from openai import OpenAI

from examples.fleet import Fleet
from tailrace.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from tests.harness.servers import MODEL, TailraceCluster


@dataclass(frozen=True, slots=True)
class ServedFleet:
    """A running fleet with clients of its APIs."""

    url: str
    fleet: Fleet
    client: OpenAI
    admin: admin_pb2_grpc.AdminStub

    def move_methods(self) -> dict[str, tuple[str, str]]:
        """Return how the requests of each instance are migrated, and why not live."""
        reply = self.admin.ListInstances(admin_pb2.ListInstancesRequest(), timeout=5)
        return {i.instance_id: (types_pb2.Way.Name(i.way)[4:].lower(), i.way_reason) for i in reply.instances}


@contextmanager
def serve_fleet(name: str, model: str = "", flags: Sequence[str] = ()) -> Iterator[ServedFleet]:
    """Run a fleet for the block. `flags`: those of `vllm serve`; `model` empty: the tiny one."""
    arguments = ["--workers", "2", "--policy", "least_loaded", "--no-traces", "--served-model-name", MODEL]
    arguments = [*([model] if model else []), *arguments, *flags]
    arguments += ["--report-interval", "0.1", "--kv-blocks", "1024"]
    with TailraceCluster(name, arguments) as cluster:
        channel = grpc.insecure_channel(cluster.admin.split(",")[0])
        admin = admin_pb2_grpc.AdminStub(channel)
        client = OpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=180, max_retries=0)
        try:
            yield ServedFleet(cluster.url, Fleet(admin), client, admin)
        finally:
            client.close()
            channel.close()
