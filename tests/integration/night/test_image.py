"""The container image, made by the lines of its Dockerfile without a daemon, serves a broker."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from delaylevel.broker.process import free_ports
from support.dockerfile import instructions
from support.pages import ROOT
from support.processes import create, found, park
from support.world import RealWorld

pytestmark = pytest.mark.broker


@pytest.mark.timeout(600)
def test_the_image_serves(world: RealWorld, environment: dict[str, str], tmp_path: Path) -> None:
    steps = instructions(ROOT / "deploy" / "Dockerfile")
    (port,) = map(str, free_ports(1))
    places = {
        "/opt/delaylevel": f"{tmp_path}/opt",
        "/var/lib/delaylevel": f"{tmp_path}/var",
        "public/default": world.namespace,
        "9109": port,
    }

    def here(text: str) -> str:
        for name, instead in places.items():
            text = text.replace(name, instead)
        return text

    context, python = tmp_path / "src", Path(sys.executable).parent
    context.mkdir()
    for name, value in steps:
        if name == "COPY" and not value[0].startswith("-"):
            *sources, target = value
            for source in sources:
                path = ROOT / source
                if path.is_dir():
                    shutil.copytree(path, context / target)
                else:
                    shutil.copy(path, context / target)
        elif name == "RUN":
            path_variable = {**os.environ, "PATH": f"{python}:{os.environ['PATH']}"}
            subprocess.run(["sh", "-ec", here(value)], cwd=context, env=path_variable, check=True)

    image = dict(steps)
    description = create(world)
    (orders,) = description.targets
    health = [f"{tmp_path}/opt/bin/python", *map(here, image["HEALTHCHECK"][1:])]

    def is_healthy() -> bool:
        return subprocess.run(health, capture_output=True, check=False).returncode == 0

    assert not is_healthy()
    command = [f"{tmp_path}/opt/bin/{image['ENTRYPOINT'][0]}", *map(here, image["CMD"])]
    variables = {**environment, "HOME": f"{tmp_path}/var", "PYTHONPATH": ""}
    log = tmp_path / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(command, stderr=errors, env=variables, cwd=tmp_path / "var")
    try:
        world.eventually(is_healthy, "health")
        bodies = park(world, orders, 5, 1_200, 2_500)
        world.eventually(lambda: found(world, orders).keys() == bodies, "all messages")
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
        print(log.read_text())
