"""Files in deploy/: their commands, options, ports, paths and variables exist."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from delaylevel import __version__
from delaylevel.broker.distribution import PULSAR_VERSION
from delaylevel.cli.main import cli
from delaylevel.cluster.connection.settings import Connection
from delaylevel.web.application import PROBES
from delaylevel.web.reports import ACTION_TOKEN_VARIABLE, TOKEN_VARIABLE
from support.dockerfile import instructions
from support.pages import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
FILES = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file()]


def parsed(arguments: list[str]) -> Mapping[str, Any]:
    """Return the values of a command's options, as the program reads them; start nothing."""
    with cli.make_context("delaylevel", list(arguments)) as context:
        name, command, rest = cli.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        assert command is not None
        with command.make_context(name, rest, parent=context) as inner:
            return {"command": name, **inner.params}


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def deployment() -> Any:
    (found,) = documents(KUBERNETES / "deployment.yaml")
    return found["spec"]


def container() -> Any:
    (found,) = deployment()["template"]["spec"]["containers"]
    return found


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "delaylevel.service").read_text("utf-8"))
    return parser


def image() -> list[tuple[str, Any]]:
    return instructions(DEPLOY / "Dockerfile")


def lines() -> dict[str, list[str]]:
    program, *service = unit()["Service"]["ExecStart"].split()
    assert program.endswith("/bin/delaylevel")
    steps = dict(image())
    assert steps["ENTRYPOINT"] == ["delaylevel"]
    return {"systemd": service, "image": steps["CMD"], "kubernetes": container()["args"]}


@pytest.mark.parametrize("host", lines())
def test_the_program_has_the_command_and_its_options(host: str) -> None:
    found = parsed(lines()[host])
    assert (found["command"], found["metrics_port"]) == ("run", 9109)
    assert str(found["spill_dir"]) == "/var/lib/delaylevel"
    with pytest.raises(click.UsageError):
        parsed([*lines()[host], "--no-such-option"])


def test_ports_and_probes_are_those_of_the_service() -> None:
    steps, app = dict(image()), container()
    for host in ("image", "kubernetes"):
        assert parsed(lines()[host])["metrics_address"] == "0.0.0.0"
    port = parsed(lines()["kubernetes"])["metrics_port"]
    assert steps["EXPOSE"] == str(port)
    assert f"http://127.0.0.1:{port}{PROBES[0]}'" in steps["HEALTHCHECK"][-1]
    compile(steps["HEALTHCHECK"][-1], "HEALTHCHECK", "exec")
    assert app["ports"] == [{"name": "http", "containerPort": port}]
    asked = {kind: app[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness")}
    assert asked == {
        "liveness": {"path": "/healthz", "port": "http"},
        "readiness": {"path": "/readyz", "port": "http"},
    }
    assert {each["path"] for each in asked.values()} == set(PROBES)
    (service,) = documents(KUBERNETES / "service.yaml")
    assert service["spec"]["ports"] == [{"name": "http", "port": port, "targetPort": "http"}]
    (compose,) = documents(DEPLOY / "compose.yaml")
    assert compose["services"]["delaylevel"]["ports"] == [f"127.0.0.1:{port}:{port}"]


def test_folders_are_writable_and_nothing_runs_as_root() -> None:
    assert dict(image())["USER"] == "10001:10001"
    pod, app = deployment()["template"]["spec"], container()
    assert pod["securityContext"]["runAsNonRoot"]
    assert app["securityContext"]["readOnlyRootFilesystem"]
    mounted = {each["name"]: each["mountPath"] for each in app["volumeMounts"]}
    assert mounted == {"spill": "/var/lib/delaylevel", "tmp": "/tmp"}
    assert mounted.keys() == {each["name"] for each in pod["volumes"]}
    service = unit()["Service"]
    assert (service["DynamicUser"], service["StateDirectory"]) == ("yes", "delaylevel")


def test_two_replicas_keep_one_running() -> None:
    assert deployment()["replicas"] == 2
    (budget,) = documents(KUBERNETES / "disruption.yaml")
    assert budget["spec"]["maxUnavailable"] == 1
    assert deployment()["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_variables_and_images_are_real() -> None:
    known = {f"DELAYLEVEL_{name.upper()}" for name in Connection.model_fields}
    known |= {TOKEN_VARIABLE, ACTION_TOKEN_VARIABLE}
    for path in FILES:
        text = path.read_text("utf-8")
        assert set(re.findall(r"\bDELAYLEVEL_[A-Z_]+", text)) <= known, path
        for name in re.findall(r"^\s*(?:FROM|image:) (\S+)", text, re.MULTILINE):
            assert not re.search(r"[.:]", name.partition("/")[0]) or "/" not in name, name
    (compose,) = documents(DEPLOY / "compose.yaml")
    assert compose["services"]["pulsar"]["image"] == f"apachepulsar/pulsar:{PULSAR_VERSION}"


def test_kustomize_builds_the_base() -> None:
    (base,) = documents(KUBERNETES / "kustomization.yaml")
    names = {path.name for path in KUBERNETES.iterdir()} - {"kustomization.yaml"}
    assert {*base["resources"]} == names
    assert base["images"] == [{"name": container()["image"], "newTag": __version__}]
    program = shutil.which("kubectl")
    if program is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [program, "kustomize", str(KUBERNETES)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    found = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert found.keys() == {"ConfigMap", "Deployment", "PodDisruptionBudget", "Service"}
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["PodDisruptionBudget"]["spec"]["selector"] == {"matchLabels": labels}
    assert found["Service"]["spec"]["selector"] == labels


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd is not installed")
    text = (DEPLOY / "delaylevel.service").read_text("utf-8")
    path = tmp_path / "delaylevel.service"

    def verdict(text: str) -> str:
        path.write_text(text.replace("/opt/delaylevel/bin/delaylevel", sys.executable), "utf-8")
        done = subprocess.run(
            [program, "verify", path], capture_output=True, text=True, check=False
        )
        return done.stderr

    assert verdict(text) == ""
    assert "RestartSeconds" in verdict(text.replace("RestartSec=", "RestartSeconds="))
