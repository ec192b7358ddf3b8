"""Run by test_pods.py in namespaces of its own: a fleet without TLS on Kubernetes (pod_network.py)."""

from __future__ import annotations

from pathlib import Path

from tailrace.tiny.task import task
from tests.e2e.pod_network import MODEL, PORT, rendered_pods
from tests.harness.chats import Chats
from tests.harness.processes import wait_until

FLEET = {"models": [{**MODEL, "replicas": 1}], "insecure": True, "kubernetes": {"etcd": 1}}


def test_a_front_end_is_ready_once_an_instance_is(tmp_path: Path) -> None:
    with rendered_pods(tmp_path, FLEET) as pods:
        worker, front_end = pods["worker-0"], pods["frontend-0"]
        others = [pod for pod in pods.values() if pod is not worker]
        for pod in others:
            pod.start()
        for pod in others:
            if pod is not front_end:
                wait_until(pod.ready, f"{pod.name} to be ready")
        # It learns from an instance what it serves: nothing looks yet whether it is alive.
        assert not front_end.ready() and not front_end.probe("startupProbe")
        worker.start()
        wait_until(lambda: worker.probe("startupProbe") and worker.ready(), "the worker to be ready")
        wait_until(lambda: front_end.probe("startupProbe"), "the front end to start")
        wait_until(front_end.ready, "the front end to be ready")
        assert all(pod.probe("livenessProbe") for pod in pods.values())
        chats = Chats(f"http://{front_end.address}:{PORT}")
        try:
            assert chats.run(task("wxyz", 20, 10).prompt).answer
        finally:
            chats.close()
        assert worker.stop() == 0
        wait_until(lambda: not front_end.ready(), "the front end to see that no instance is left")
        # A restart would not help it.
        assert front_end.probe("livenessProbe")
