"""Settings: flags over environment over file over defaults, and errors that name source and key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from pydantic import ValidationError
from typer.testing import CliRunner

from server.cli import build
from server.cli.flags import with_settings
from server.settings import DEMO, FROM_FILES, Settings
from server.sources import KNOWN, SettingsError, load_settings, written_out


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "unbind.toml"
    file.write_text('port = 1\nmax_slots = 2\nqueue_limit = 3\nhost = "127.0.0.2"\n')
    environment = {"UNBIND_CONFIG": str(file), "UNBIND_PORT": "11", "UNBIND_MAX_SLOTS": "12", "OTHER": "x"}
    environment["UNBIND_URL"] = "http://127.0.0.1:8000"  # is the commands' that ask a server
    made = load_settings({"port": "21", "host": None}, environment)
    assert (made.port, made.max_slots, made.queue_limit, made.host) == (21, 12, 3, "127.0.0.2")


@pytest.mark.parametrize(
    ("flags", "environment", "text", "says"),
    [
        ({}, {"UNBIND_PROT": "1"}, "", "environment: unknown setting 'UNBIND_PROT'"),
        ({}, {}, "prot = 1", "unknown setting 'prot'"),
        ({"port": "many"}, {}, "", r"flags: port \('many'\)"),
        ({}, {"UNBIND_DTYPE": "int3"}, "", r"environment: dtype \('int3'\)"),
        (
            {},
            {"UNBIND_LEASE_SECONDS": "infinity"},
            "",
            r"lease_seconds \('infinity'\): Input should be a finite number",
        ),
        ({}, {}, "request_timeout = nan", r"request_timeout \(nan\)"),
        ({}, {}, "max_slots = -1", r"max_slots \(-1\)"),
        ({}, {}, "port = ", "not TOML"),
        ({}, {"UNBIND_WORKER": "perhaps"}, "", "environment: worker"),
    ],
)
def test_a_bad_setting_is_named_with_its_source(
    tmp_path: Path, flags: dict[str, str], environment: dict[str, str], text: str, says: str
) -> None:
    file = tmp_path / "unbind.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=says):
        load_settings(flags, environment, file)


def test_the_demo_model_comes_with_its_adapter_and_another_without() -> None:
    assert Settings().adapter == DEMO / "adapter" and Settings().is_demo
    assert Settings(model=Path("mine")).adapter is None
    assert Settings(model=Path("/models/mine")).served_name == "mine"


def test_the_demo_s_modules_are_left_out_beside_a_model_that_they_are_not_for() -> None:
    folder = Settings().modules_dir
    assert folder is not None and Settings(model=DEMO / "base", adapter=DEMO / "adapter").modules_dir == folder
    for own in ({"model": "mine"}, {"adapter": "mine"}, {"model": str(DEMO / "base")}):
        assert load_settings(own).modules_dir is None
        assert load_settings(own | {"modules_dir": str(folder)}).modules_dir == folder
    child = load_settings({}, written_out(load_settings({"model": "mine"})))
    assert child.modules_dir is None


def test_retain_rows_of_one_s_own_are_not_calibrated_on_the_demo_s() -> None:
    assert Settings().retain_calibration is not None
    assert Settings(retain=Path("mine.jsonl")).retain_calibration is None
    assert Settings(retain=Path("mine.jsonl"), retain_calibration=Path("more.jsonl")).retain_calibration is not None


def test_settings_travel_to_a_child_process_whole_but_for_the_admin_key() -> None:
    several = {
        "gate_layers": (20, -1),
        "vllm_args": (
            "seed=1",
            'compilation-config={"mode": 0, "sizes": [1, {"of": "a,]"}], "b": "\\",]"}',
            "enable-lora",
        ),
        "cors_origins": ("http://a.example", "http://b.example"),
    }
    made = Settings(model=Path("mine"), admin_key="secret", worker=False, retain_test=None, port=5, **several)
    environment = written_out(made)
    assert "secret" not in environment.values() and "secret" not in repr(made)
    assert load_settings({}, environment) == made.model_copy(update={"admin_key": ""})


def test_what_is_secret_comes_from_files_too(tmp_path: Path) -> None:
    held = {"admin_key": "from-a-file", "database_url": "sqlite:///other", "guard_key": "ab" * 32}
    for name, text in held.items():
        (tmp_path / name).write_text(text + "\n")
    config = tmp_path / "unbind.toml"
    config.write_text(f"guard_key_file = '{tmp_path / 'guard_key'}'\n")
    environment = {"UNBIND_DATABASE_URL_FILE": str(tmp_path / "database_url"), "UNBIND_PRIVATE_KEY_FILE": ""}
    made = load_settings({"admin_key_file": str(tmp_path / "admin_key")}, environment, config)
    assert made == Settings(**held)
    assert not any("KEY" in name for name in written_out(made))


@pytest.mark.parametrize("name", sorted(FROM_FILES))
def test_a_file_that_holds_no_secret_is_named_with_its_source(tmp_path: Path, name: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text("from-a-file")
    variable = f"UNBIND_{name.upper()}"
    with pytest.raises(SettingsError, match=f"environment: {name}_file: given beside {name}; give one"):
        load_settings({}, {f"{variable}_FILE": str(secret), variable: "other"})
    for content, says in ((None, "cannot be read"), (b" \n", "is empty"), (b"\xff\xfe", "not text")):
        secret.unlink(missing_ok=True)
        if content is not None:
            secret.write_bytes(content)
        with pytest.raises(SettingsError, match=f"flags: {name}_file .*secret: {says}"):
            load_settings({f"{name}_file": str(secret)}, {f"{variable}": ""})


def test_a_bad_secret_in_a_file_is_told_of_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no-hexadecimal-key")
    with pytest.raises(SettingsError, match=r"guard_key_file .*key: guard_key: .*64 hexadecimal") as told:
        load_settings({}, {"UNBIND_GUARD_KEY_FILE": str(tmp_path / "key")})
    assert "no-hexadecimal-key" not in str(told.value)


def test_a_path_may_begin_with_a_tilde_and_is_not_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "unbind.toml").write_text('data_dir = "~/kept"\nadapter = ""\n')
    (tmp_path / "key").write_text("secret")
    environment = {"UNBIND_CONFIG": "~/unbind.toml", "UNBIND_ADMIN_KEY_FILE": "~/key", "UNBIND_MODULE_STORE": "~/store"}
    made = load_settings({"audit_head": "~/head"}, environment)
    assert (made.data_dir, made.audit_head) == (tmp_path / "kept", tmp_path / "head")
    assert (made.admin_key, made.module_store, made.adapter) == ("secret", str(tmp_path / "store"), None)
    assert load_settings({"private_store": "s3://bucket/~x"}).private_store == "s3://bucket/~x"
    for flags, variables in (({"data_dir": ""}, {}), ({}, {"UNBIND_DATA_DIR": ""})):
        with pytest.raises(
            SettingsError, match=r"^(flags|environment): data_dir: is empty; name a path, or leave it out"
        ):
            load_settings(flags, variables)


def test_settings_that_do_not_go_together_are_told_of_without_the_others() -> None:
    with pytest.raises(SettingsError, match=r"^settings: ready_needs_canary: no canaries are run; set canary") as told:
        load_settings(
            {"ready_needs_canary": True}, {"UNBIND_ADMIN_KEY": "top-secret", "UNBIND_UPSTREAM_KEY": "top-secret"}
        )
    assert "top-secret" not in str(told.value)


def test_a_file_may_begin_with_a_mark_of_its_encoding(tmp_path: Path) -> None:
    key, file = tmp_path / "key", tmp_path / "unbind.toml"
    key.write_bytes(b"\xef\xbb\xbfsecret\r\n")
    file.write_text(f"admin_key_file = '{key}'\r\n", encoding="utf-8-sig")
    assert load_settings({}, {}, file).admin_key == "secret"


def test_modules_of_the_server_and_profiles_come_from_the_file_and_travel(tmp_path: Path) -> None:
    file = tmp_path / "unbind.toml"
    file.write_text(
        'enforced = ["a", "b"]\ncors_origins = ["https://ide.example"]\n'
        '[profiles.team]\nmodules = {c = 0.5}\nenforced = ["d"]\n[profiles.open]\n'
    )
    made = load_settings({}, {}, file)
    assert made.enforced == {"a": 1.0, "b": 1.0} and made.profiles["team"].modules == {"c": 0.5}
    assert load_settings({}, written_out(made)) == made
    flags = load_settings(
        {"enforced": "a, b", "cors_origins": "x,y", "profiles": '{"team": {"modules": {"c": 0.5}}}'}, {}
    )
    assert flags.enforced == made.enforced and flags.cors_origins == ("x", "y") and set(flags.profiles) == {"team"}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"enforced": "../a"}, "enforced"),
        ({"enforced": '{"a": 0}'}, "enforced"),
        ({"profiles": "team"}, "profiles.*not JSON"),
        ({"profiles": '{"gpt-o3": {}}'}, "profiles.*o1, o3 or o4"),
        ({"profiles": '{"team": {"moduls": []}}'}, "profiles"),
        ({"request_timeout": "0"}, "request_timeout"),
    ],
)
def test_bad_rules_in_settings_are_named(flags: dict[str, str], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        load_settings(flags, {})


def test_settings_do_not_change() -> None:
    with pytest.raises(ValidationError):
        Settings().port = 1


def test_every_setting_is_a_flag_of_a_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Settings] = []
    app = typer.Typer()
    app.command()(with_settings([])(told.append))
    monkeypatch.setenv("UNBIND_WORKER", "yes")
    given = ["--no-worker", "--insecure", "--max-slots", "4", "--data-dir", str(tmp_path), "--enforced", "a,b"]
    assert CliRunner().invoke(app, [*given, "--retain-test", "rows.jsonl"]).exit_code == 0
    (made,) = told
    assert (made.worker, made.insecure, made.max_slots, made.data_dir) == (False, True, 4, tmp_path)
    assert made.enforced == {"a": 1.0, "b": 1.0} and made.retain_test == Path("rows.jsonl")
    shown = CliRunner(env={"COLUMNS": "250"}).invoke(app, ["--help"]).output
    assert all(f"--{name.replace('_', '-')}" in shown for name in KNOWN)
    for said in (
        "port to listen on [default: (8000)]",
        "beside the server [default: (on)]",
        "no key exists [default: (off)]",
        "checkpoint to serve [default: (the demo's)]",
    ):
        assert said in " ".join(shown.split())
    assert CliRunner().invoke(app, ["--max-slots", "many"]).exit_code == 2


def test_settings_in_force_are_shown_with_what_gives_them_and_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "unbind.toml"
    file.write_text('port = 81\nmax_slots = 2\nguard_key_file = "~/guard"\n[profiles.team]\nmodules = ["a"]\n')
    (tmp_path / "guard").write_text("ab" * 32)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("UNBIND_CONFIG", str(file))
    monkeypatch.setenv("UNBIND_MAX_SLOTS", "12")
    monkeypatch.setenv("UNBIND_DATABASE_URL", "postgresql+psycopg://u:not@told@h/n?password=this&host=h2")
    given = ["settings", "--model", "/models/mine", "--admin-key", "neither", "--no-worker", "--json"]
    shown = CliRunner().invoke(build(), given)
    assert shown.exit_code == 0, shown.output
    settings = {name: (one["value"], one["from"]) for name, one in json.loads(shown.stdout).items()}
    assert settings.pop("profiles")[1] == f"file {file}"
    assert settings == {
        "model": ("/models/mine", "flags"),
        "modules_dir": (None, "other settings"),  # those that ship are for the demo
        "port": (81, f"file {file}"),
        "max_slots": (12, "environment"),
        "worker": (False, "flags"),
        "admin_key": ("(secret)", "flags"),
        "guard_key": ("(secret)", f"file {file}: guard_key_file {tmp_path / 'guard'}"),
        "database_url": ("postgresql+psycopg://u:***@h/n?password=***&host=h2", "environment"),
    }
    lines = CliRunner().invoke(build(), [*given[:-1], "--all"]).stdout.splitlines()
    assert len(lines) == 1 + len(Settings.model_fields)
    assert sum('{"team": {"modules": {"a": 1.0}' in line for line in lines) == 1
    assert ["worker", "false", "flags"] in map(str.split, lines) and ["host", "127.0.0.1", "default"] in map(
        str.split, lines
    )


def test_wrong_settings_end_the_command_that_shows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNBIND_PROT", "1")
    shown = CliRunner().invoke(build(), ["settings"])
    assert shown.exit_code == 2 and "unknown setting 'UNBIND_PROT'" in shown.stderr
