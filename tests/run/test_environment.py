"""Kaggle, Colab or elsewhere: where runs and outputs go, and where secrets come from."""

import os
import sys
import types

import pytest
from harness.modules import fake_module, no_such_secret

from multigpu_ft import diagnostics
from multigpu_ft.run import environment, secrets

pytestmark = pytest.mark.usefixtures("elsewhere")


def test_on_kaggle(monkeypatch, kaggle, tmp_path):
    monkeypatch.setenv("COLAB_RELEASE_TAG", "Kaggle's image has it as well")
    assert environment.platform() == "kaggle" and environment.default_run_root() == str(
        tmp_path / "kaggle_scratch" / "runs"
    )
    assert (
        environment.outputs_folder() == tmp_path / "kaggle_outputs"
        and environment.session_hours() == pytest.approx(10, abs=0.01)
    )
    assert "30 hours" in environment.quota_note()
    monkeypatch.setattr(
        environment.psutil, "Process", lambda pid: types.SimpleNamespace(create_time=lambda: 0.0)
    )
    assert environment.session_hours() is None


def test_on_colab(monkeypatch, tmp_path):
    fake_module(monkeypatch, "google.colab")
    assert environment.platform() == "colab" and environment.default_run_root() == str(
        tmp_path / "colab_scratch" / "runs"
    )
    assert (
        environment.outputs_folder() is None and "drive.mount" in diagnostics._outputs_row().remedy
    )
    environment.COLAB_DRIVE.mkdir()
    assert environment.outputs_folder() == tmp_path / "colab_drive" / "multigpu_ft"


def test_elsewhere():
    assert (environment.platform(), environment.default_run_root()) == ("other", "runs")
    assert (
        environment.outputs_folder()
        is environment.session_hours()
        is environment.quota_note()
        is None
    )


def test_secrets_of_kaggle(monkeypatch, kaggle):
    stored = {"HF_TOKEN": "hf_x\n"}
    fake_module(
        monkeypatch,
        "kaggle_secrets",
        UserSecretsClient=lambda: types.SimpleNamespace(get_secret=lambda name: stored[name]),
    )
    monkeypatch.setenv("WANDB_API_KEY", "mine")
    assert secrets.secret("HF_TOKEN") == "hf_x" and secrets.secret("OTHER") is None
    assert (
        secrets.use_secrets() == ["HF_TOKEN"]
        and os.environ["HF_TOKEN"] == "hf_x"
        and os.environ["WANDB_API_KEY"] == "mine"
    )
    stored["HF_TOKEN"] = "hf_y"
    assert secrets.use_secrets() == [] and os.environ["HF_TOKEN"] == "hf_x", "what is there stays"
    monkeypatch.delenv("HF_TOKEN")
    assert secrets.use_secrets() == ["HF_TOKEN"], "asked again by the same process"
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setenv(secrets._ASKED, "1")
    assert secrets.use_secrets() == [], "a parent has asked"


def test_a_store_that_does_not_answer_is_asked_once(monkeypatch, kaggle):
    asked = []

    def get_secret(name):
        asked.append(name)
        raise ConnectionError

    fake_module(
        monkeypatch,
        "kaggle_secrets",
        UserSecretsClient=lambda: types.SimpleNamespace(get_secret=get_secret),
    )
    assert secrets.use_secrets() == [] and asked == ["HF_TOKEN"]


@pytest.mark.parametrize("get", [no_such_secret, lambda name: "", lambda name: None])
def test_a_store_without_the_secret(monkeypatch, get):
    fake_module(monkeypatch, "google.colab", userdata=types.SimpleNamespace(get=get))
    monkeypatch.setitem(
        sys.modules, "google", types.SimpleNamespace(colab=sys.modules["google.colab"])
    )
    assert (
        secrets.secret("HF_TOKEN") is None
        and secrets.use_secrets() == []
        and "HF_TOKEN" not in os.environ
    )
    sys.modules["google.colab"].userdata.get = lambda name: "hf_z"
    assert secrets.secret("HF_TOKEN") == "hf_z"
