"""Collector, Prometheus and Grafana files parse and use addresses of the cluster's services."""

from __future__ import annotations

import json
from typing import Literal, NotRequired, TypedDict, TypeVar

import yaml

from tests.deploy.compose import DEPLOY, load_compose

SERVICES = load_compose()["services"]


File = TypeVar("File")


class Targets(TypedDict):
    targets: list[str]
    labels: NotRequired[dict[str, str]]


class Job(TypedDict):
    static_configs: list[Targets]


class Prometheus(TypedDict):
    scrape_configs: list[Job]


class Exporter(TypedDict):
    endpoint: str


class CollectorService(TypedDict):
    extensions: list[str]
    pipelines: dict[str, dict[Literal["receivers", "processors", "exporters"], list[str]]]


class Collector(TypedDict):
    receivers: dict[str, object]
    processors: dict[str, object]
    exporters: dict[str, Exporter]
    extensions: dict[str, object]
    service: CollectorService


class ProviderOptions(TypedDict):
    path: str


class Provider(TypedDict):
    options: ProviderOptions


class Dashboards(TypedDict):
    providers: list[Provider]


class Datasource(TypedDict):
    uid: str


class Datasources(TypedDict):
    datasources: list[Datasource]


def _yaml(path: str, kind: type[File]) -> File:
    """Return the file as plain data; `kind` describes the fields that are read."""
    loaded: File = yaml.safe_load((DEPLOY / path).read_text())
    assert isinstance(loaded, dict)
    return loaded


def _metrics_ports() -> dict[str, str]:
    return {
        name: word.rpartition(":")[2]
        for name, about in SERVICES.items()
        for word in about.get("command", [])
        if word.startswith("--metrics=")
    }


def test_prometheus_scrapes_every_service() -> None:
    scraped = {}
    for job in _yaml("prometheus.yml", Prometheus)["scrape_configs"]:
        for static in job["static_configs"]:
            for target in static["targets"]:
                host, port = target.split(":")
                assert static.get("labels", {"member": host}) == {"member": host}
                scraped[host] = port
    assert scraped.pop("etcd") == "2379"
    assert scraped == _metrics_ports()


def test_collector_pipelines_use_defined_components() -> None:
    config = _yaml("otel-collector.yaml", Collector)
    for pipeline in config["service"]["pipelines"].values():
        for kind, names in pipeline.items():
            assert set(names) <= set(config[kind])
    assert set(config["service"]["extensions"]) <= set(config["extensions"])


def test_spans_are_sent_to_listening_services() -> None:
    exporters = _yaml("otel-collector.yaml", Collector)["exporters"]
    assert "--listen=0.0.0.0:7102" in SERVICES["monitor"]["command"]
    assert exporters["otlp/monitor"]["endpoint"] == "monitor:7102"
    assert exporters["otlp/jaeger"]["endpoint"] == "jaeger:4317"
    for name in _metrics_ports():
        endpoint = SERVICES[name]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"]
        assert endpoint == "http://otel-collector:4317"


def test_grafana_finds_its_dashboard_and_sources() -> None:
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    dashboards = _yaml("grafana/provisioning/dashboards/tailrace.yml", Dashboards)
    folder = dashboards["providers"][0]["options"]["path"]
    assert mounts["./grafana/dashboards"] == folder
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{folder}/tailrace.json"
    sources = _yaml("grafana/provisioning/datasources/tailrace.yml", Datasources)["datasources"]
    uids = {source["uid"] for source in sources}
    dashboard = json.loads((DEPLOY / "grafana/dashboards/tailrace.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] in uids
            assert target["expr"]


def test_panels_do_not_overlap() -> None:
    dashboard = json.loads((DEPLOY / "grafana/dashboards/tailrace.json").read_text())
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        covered = {
            (x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not covered & cells, panel["title"]
        cells |= covered
