"""RocketMQ 5: a broker with its timer wheel, and a name server, both from Maven."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from delaylevel.broker import process
from delaylevel.broker.distribution import java

from .system import HEAP_MB, TOPIC, System, cache

_SOURCES = Path(__file__).with_name("rocketmq")
_DAYS_S = 31 * 86_400
# Private parts of Java that RocketMQ uses, as in its own start scripts.
_OPENED = (
    "--add-exports=java.base/jdk.internal.ref=ALL-UNNAMED",
    "--add-exports=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/sun.nio.ch=ALL-UNNAMED",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
)


class RocketMq(System):
    """One broker and one name server. Messages have a time of delivery for the timer wheel."""

    name = "rocketmq"
    title = "RocketMQ"
    settings = (
        "It confirms before the disk has the data: `flushDiskType` is ASYNC_FLUSH (its default). "
        "`timerMaxDelaySec` is 31 days instead of 3, and for the cancellations "
        "`recallMessageEnable` is true."
    )

    _ports: tuple[int, ...] = ()

    def fetch(self) -> None:
        if self._classpath_file().is_file():
            return
        maven = shutil.which("mvn")
        if maven is None:
            raise RuntimeError("RocketMQ is fetched with Maven, and `mvn` is not on the PATH")
        command = [
            *(maven, "--batch-mode", "--quiet", "--strict-checksums"),
            *("--file", str(_SOURCES / "pom.xml")),
            f"-Doutput.directory={self._folder()}",
            *("compile", "dependency:build-classpath"),
            f"-Dmdep.outputFile={self._classpath_file()}",
        ]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL)

    def version(self) -> str:
        found = re.search(r"<rocketmq.version>(.*)</", (_SOURCES / "pom.xml").read_text())
        assert found is not None
        return f"RocketMQ {found[1]}"

    def start(self, cancellable: bool) -> None:
        directory = self.directory
        # The broker also uses the port two below its own one.
        names, broker = process.free_ports(2)
        self._ports = (names, broker)
        (directory / "names.conf").write_text(
            f"listenPort={names}\nbindAddress=127.0.0.1\n"
            f"kvConfigPath={directory}/names/kv.json\nconfigStorePath={directory}/names/names\n"
        )
        settings = {
            "brokerName": "compare",
            "brokerId": 0,
            "namesrvAddr": self._servers,
            "brokerIP1": "127.0.0.1",
            "brokerIP2": "127.0.0.1",
            "bindAddress": "127.0.0.1",
            "listenPort": broker,
            "storePathRootDir": directory / "store",
            "storePathCommitLog": directory / "store" / "commitlog",
            "timerMaxDelaySec": _DAYS_S,
            "recallMessageEnable": str(cancellable).lower(),
        }
        text = "".join(f"{name}={value}\n" for name, value in settings.items())
        (directory / "broker.conf").write_text(text)
        self.restart()
        subprocess.run(
            [*self.client("topic"), f"topic={TOPIC}"],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=60,
        )

    def restart(self) -> None:
        for name, conf, heap_mb in (
            ("namesrv.NamesrvStartup", "names", 128),
            ("broker.BrokerStartup", "broker", HEAP_MB),
        ):
            command = self._java(f"org.apache.rocketmq.{name}", heap_mb)
            command += ["-c", str(self.directory / f"{conf}.conf")]
            self.run(command, conf, lambda server: "boot success" in server.log())

    def client(self, action: str) -> list[str]:
        command = self._java("compare.Client", 400)
        return [*command, action, f"servers={self._servers}", f"topic={TOPIC}"]

    @property
    def _servers(self) -> str:
        return f"127.0.0.1:{self._ports[0]}"

    def _java(self, main: str, heap_mb: int) -> list[str]:
        """Return the command line of a class, with all logs in our directory."""
        classpath = f"{self._folder()}/classes:{self._classpath_file().read_text().strip()}"
        return [
            *(java(), *_OPENED, "-XX:+UseSerialGC", "-Xms64m", f"-Xmx{heap_mb}m"),
            *(f"-XX:MaxDirectMemorySize={heap_mb}m", f"-Duser.home={self.directory}"),
            *(f"-Drocketmq.home.dir={self.directory}", "-cp", classpath, main),
        ]

    def _folder(self) -> Path:
        return cache(self.version().lower().replace(" ", "-"))

    def _classpath_file(self) -> Path:
        return self._folder() / "classpath"
