"""Tests of the import of an application's listeners by name."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delaylevel.consumer.listeners import load, split_target
from delaylevel.errors import ConfigError

Write = Callable[..., str]

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

    def write(text: str, name: str = "shop_app.py") -> str:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("shop"):
            del sys.modules[name]


def test_a_module_of_the_current_folder_is_found(write: Write) -> None:
    write(APP)
    app = load("shop_app:app")
    assert [listener.name for listener in app.listeners] == ["bill"]
    assert load("shop_app") is app, "the only Listeners"


def test_a_name_may_have_dots_and_be_a_function(write: Write) -> None:
    write("")
    write("", "shop/__init__.py")
    write(APP + "\n\ndef make():\n    return app\n\nclass Space:\n    app = app\n", "shop/app.py")
    app = load("shop.app:app")
    assert load("shop.app:make") is app
    assert load("shop.app:Space.app") is app


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("shop/billing.py", r"is a path: write the name of the module, shop.billing:app"),
        ("./shop/billing.py:run", r"write the name of the module, shop.billing:run"),
        ("shop.billing:", r"is not MODULE:NAME"),
        (":app", r"is not MODULE:NAME"),
        ("shop:app()", r"is not MODULE:NAME"),
    ],
)
def test_a_wrong_form_is_refused(target: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        split_target(target)


@pytest.mark.parametrize(
    ("text", "target", "expected"),
    [
        (APP, "shop_ap:app", r"there is no module shop_ap in .*: check the name, or change to"),
        (APP, "shop_app.billing:app", r"there is no module shop_app.billing in"),
        (APP, "shop_app:ap", r"shop_app has no name ap \(its listeners: app\)"),
        (APP, "shop_app:bill", r"shop_app:bill is a function with arguments"),
        ("app = 3", "shop_app:app", r"is no Listeners, but of type int"),
        ("x = 3", "shop_app:app", r"\(its listeners: none; write app = Listeners\(client\)\)"),
        ("x = 3", "shop_app", r"has no Listeners, so name one: shop_app:NAME"),
        (APP + "other = Listeners(None)", "shop_app", r"has 2 Listeners, .*one of app, other"),
        (APP.partition("@")[0], "shop_app:app", r"has no listeners: decorate functions with @app"),
        (
            "import shop_other",
            "shop_app:app",
            r"(?s)importing shop_app failed.*py.*line 1",
        ),
        ("1 / 0", "shop_app:app", r"(?s)shop_app.py.*ZeroDivisionError"),
        ("def make():\n    raise OSError('no disk')", "shop_app:make", r"(?s)calling.*no disk"),
    ],
)
def test_a_wrong_application_is_refused(
    write: Write, text: str, target: str, expected: str
) -> None:
    write(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        load(target)
    assert "importlib" not in str(caught.value)
