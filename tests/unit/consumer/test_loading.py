"""Tests of the import of an application's listeners by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delaylevel.consumer.listeners import load
from delaylevel.errors import ConfigError

Write = Callable[..., None]

APP = """
from delaylevel.consumer import Listeners

app = Listeners(client=None)

@app.on("orders", subscription="billing")
def bill(message): ...
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Return a function that writes a module in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)

    def write(text: str, name: str = "shop_app.py") -> None:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("shop"):
            del sys.modules[name]


def test_a_module_of_the_current_folder_is_found(write: Write) -> None:
    write("", "shop/__init__.py")
    write(APP, "shop/app.py")
    write(APP)
    assert [listener.name for listener in load("shop.app:app").listeners] == ["bill"]
    assert [listener.name for listener in load("shop_app:app").listeners] == ["bill"]


@pytest.mark.parametrize("target", ["shop/billing.py", "./shop/app.py:run", "shop:", "shop:app()"])
def test_a_wrong_form_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match="is not MODULE:NAME: write, for example"):
        load(target)


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        (APP, "shop_ap:app", r"there is no module shop_ap in .*: check the name, or change to"),
        (APP, "shop_app.billing:app", r"there is no module shop_app.billing in"),
        (APP, "shop_app:bill", r"shop_app:bill is no Listeners: that module has app;"),
        ("x = 3", "shop_app:app", r"that module has none; write app = Listeners\(client\)"),
        (APP.partition("@")[0], "shop_app:app", r"has no listeners: decorate functions with @app"),
    ],
)
def test_a_wrong_application_is_refused(
    write: Write, text: str, target: str, expected: str
) -> None:
    write(text)
    with pytest.raises(ConfigError, match=expected):
        load(target)


def test_an_error_of_the_module_is_its_own(write: Write) -> None:
    write("import shop_other")
    with pytest.raises(ModuleNotFoundError, match="shop_other"):
        load("shop_app:app")
