"""Stand-ins for modules that only some platforms have."""

import sys
import types


def fake_module(monkeypatch, name, **content):
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(**content))


def no_such_secret(*_):
    raise RuntimeError("no secret of that name")
