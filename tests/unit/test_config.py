"""The job file and our table in it: what is read, what is refused and with which words."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from placement_audit.config import DEFAULT_TIMEOUT, RankEnv, load, near_miss
from placement_audit.errors import ConfigError, UsageError

pytestmark = pytest.mark.unit

JOB = '[model]\nname = "simple_fsdp.llama3"\n[parallelism]\ntensor_parallel_degree = 2\n'
CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def write(tmp_path):
    def write(text: str | bytes, name: str = "job.toml") -> str:
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return str(path)

    return write


def refused(path: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert caught.value.exit_status == 2
    return caught.value.message


def test_a_plain_job_file_has_defaults_for_all_of_ours(write):
    path = write(JOB)
    config = load(path)
    assert config.job == {
        "model": {"name": "simple_fsdp.llama3"},
        "parallelism": {"tensor_parallel_degree": 2},
    }
    assert (config.path, config.job_path) == (path, path)
    assert (config.world_size, config.timeout, config.device) == (None, DEFAULT_TIMEOUT, "auto")
    assert config.sha256 == hashlib.sha256(JOB.encode()).hexdigest()


def test_our_table_is_taken_out_before_torchtitan_sees_the_job(write):
    config = load(write(f'{JOB}[placement_audit]\nworld_size = 8\ntimeout = 5\ndevice = "cpu"\n'))
    assert "placement_audit" not in config.job
    assert (config.world_size, config.timeout, config.device) == (8, 5.0, "cpu")


def test_the_command_line_beats_the_file(write):
    path = write(f'{JOB}[placement_audit]\nworld_size = 8\ntimeout = 5\ndevice = "cpu"\n')
    config = load(path, world_size=4, timeout=7.5, device="auto", overrides=["--model.flavor", "8B"])
    assert (config.world_size, config.timeout, config.device) == (4, 7.5, "auto")
    assert config.overrides == ("--model.flavor", "8B")


def test_a_file_of_our_own_names_the_job_file_relative_to_itself(write, tmp_path, monkeypatch):
    write(JOB)
    path = write('[placement_audit]\njob = "job.toml"\nworld_size = 4\n', "audit.toml")
    monkeypatch.chdir("/")
    config = load(path)
    assert config.job["model"]["name"] == "simple_fsdp.llama3"
    assert config.job_path == str(tmp_path / "job.toml")
    assert config.world_size == 4


def test_the_hash_covers_both_files(write):
    write(JOB)
    path = write('[placement_audit]\njob = "job.toml"\n', "audit.toml")
    before = load(path).sha256
    write(JOB + "# changed\n")
    assert load(path).sha256 != before


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("worldsize = 2", "placement_audit.worldsize: unknown key. Did you mean 'world_size'?"),
        (
            "nproc = 2",
            "placement_audit.nproc: unknown key. Known keys: config, device, job, module, overrides, suppress, "
            "timeout, world_size.",
        ),
        (
            'world_size = "2"',
            'placement_audit.world_size: expected a whole number, 1 or more; got "2" (string).',
        ),
        ("world_size = 2.0", "expected a whole number, 1 or more; got 2.0 (float)."),
        ("world_size = true", "got true (boolean)."),
        ("world_size = 0", "got 0 (integer)."),
        (
            "timeout = -1",
            "placement_audit.timeout: expected a number of seconds, more than 0; got -1 (integer).",
        ),
        ("timeout = inf", "got inf (float)."),
        ("timeout = nan", "got nan (float)."),
        ('device = "gpu"', 'placement_audit.device: expected "auto", "cpu" or "cuda"; got "gpu" (string).'),
        ("job = 3", "placement_audit.job: expected the path of a torchtitan job file, as a string; got 3"),
        (
            "overrides = 3",
            "placement_audit.overrides: expected an array of torchtitan's own options, each word",
        ),
        (
            "overrides = [3]",
            "placement_audit.overrides: expected an array of torchtitan's own options, each word",
        ),
        (
            "module = 3",
            "placement_audit.module: expected what torchtitan 0.3 takes as --module, as a string; got",
        ),
        (
            'config = ""',
            "placement_audit.config: expected what torchtitan 0.3 takes as --config, the name of a",
        ),
        ('job = ""', 'placement_audit.job: expected the path of a torchtitan job file, as a string; got ""'),
    ],
)
def test_our_table_is_strict(write, table, words):
    path = write(f"{JOB}[placement_audit]\n{table}\n")
    message = refused(path)
    assert message.startswith(f"{path}: placement_audit.")
    assert words in message


def test_all_mistakes_in_our_table_are_told_at_once(write):
    message = refused(write(f'{JOB}[placement_audit]\nworldsize = 2\ntimeout = "x"\n'))
    assert "worldsize" in message
    assert "timeout" in message
    assert len(message.splitlines()) == 2


def test_our_table_must_be_a_table(write):
    assert "expected a table ([placement_audit]), got 3 (integer)" in refused(write("placement_audit = 3\n"))


def test_missing_file(tmp_path):
    path = str(tmp_path / "none.toml")
    assert refused(path) == f"{path}: no such file. --config must be a torchtitan job file (TOML)."


def test_directory(tmp_path):
    assert "is a directory" in refused(str(tmp_path))


def test_broken_toml_names_the_line(write):
    message = refused(write("[model]\nname = \n"))
    assert "broken TOML" in message
    assert "line 2" in message


def test_not_text(write):
    assert "is not UTF-8 text" in refused(write(b"\xff\xfe\x00"))


def test_missing_job_file_names_both_files(write, tmp_path):
    path = write('[placement_audit]\njob = "none.toml"\n', "audit.toml")
    message = refused(path)
    assert str(tmp_path / "none.toml") in message
    assert path in message


def test_a_file_that_names_a_job_may_not_be_one(write):
    write(JOB)
    message = refused(write(f'{JOB}[placement_audit]\njob = "job.toml"\n', "audit.toml"))
    assert "has torchtitan's [model], [parallelism] too" in message


def test_two_tables_of_ours_are_one_too_many(write):
    write(f"{JOB}[placement_audit]\nworld_size = 2\n")
    message = refused(write('[placement_audit]\njob = "job.toml"\n', "audit.toml"))
    assert "has a [placement_audit] table, and so has" in message


@pytest.mark.parametrize("name", ["tp", "fsdp_tp", "hsdp_tp", "llama3_405b"])
def test_shipped_jobs_are_plain_torchtitan_jobs(name):
    job = load(str(CONFIGS / f"{name}.toml")).job
    assert job["model"]["name"] == "simple_fsdp.llama3"
    assert job["job"]["custom_config_module"] == "torchtitan.experiments.simple_fsdp.job_config"


REGISTERED = '[placement_audit]\nmodule = "m"\nconfig = "c"\n'


def test_a_file_may_name_a_registered_job(write):
    config = load(write(f'{REGISTERED}overrides = ["--a.b", "2"]\n'), overrides=["--a.b", "3"])
    assert (config.module, config.config_name, config.job) == ("m", "c", {})
    assert config.overrides == ("--a.b", "2", "--a.b", "3"), "what is typed comes last, and beats the file"


def test_so_may_the_command_line():
    config = load("c", module="m", overrides=["--a.b", "3"], world_size=4)
    assert (config.module, config.config_name, config.job, config.sha256) == ("m", "c", {}, "")
    assert (config.path, config.overrides, config.world_size) == ("--module m --config c", ("--a.b", "3"), 4)
    assert (config.timeout, config.device) == (DEFAULT_TIMEOUT, "auto")


def test_a_toml_jobs_file_may_have_overrides_too(write):
    config = load(write(f'{JOB}[placement_audit]\noverrides = ["--model.flavor", "8B"]\n'))
    assert (config.module, config.config_name) == (None, None)
    assert config.overrides == ("--model.flavor", "8B")


@pytest.mark.parametrize(("given", "other"), [("module", "config"), ("config", "module")])
def test_a_registered_job_has_two_names(write, given, other):
    message = refused(write(f'[placement_audit]\n{given} = "x"\n'))
    assert f"placement_audit.{given} needs placement_audit.{other} beside it" in message


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"{JOB}{REGISTERED}", "has [model], [parallelism] too"),
        (f'{REGISTERED}job = "x"', "has placement_audit.job too"),
    ],
)
def test_a_file_names_one_job(write, text, what):
    assert what in refused(write(text))


def test_the_shipped_registered_job():
    config = load(str(CONFIGS / "titan03_fsdp_tp.toml"))
    assert (config.module, config.config_name) == ("graph_trainer.llama3", "graph_trainer_llama3_debugmodel")


def test_near_miss_takes_dashes_and_case_for_typing():
    assert near_miss("World-Size", ["world_size", "timeout"]) == " Did you mean 'world_size'?"
    assert near_miss("zzz", ["world_size"]) == ""


TORCHRUN = {
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_rank_env_under_torchrun():
    assert RankEnv.from_environ(TORCHRUN) == RankEnv(rank=1, local_rank=1, world_size=2)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_part_of_torchruns_variables_is_no_torchrun(missing):
    assert RankEnv.from_environ({k: v for k, v in TORCHRUN.items() if k != missing}) is None


@pytest.mark.parametrize(("name", "value"), [("RANK", "x"), ("WORLD_SIZE", "-2"), ("RANK", "2")])
def test_rank_env_refuses_nonsense(name, value):
    with pytest.raises(UsageError, match=name):
        RankEnv.from_environ({**TORCHRUN, name: value})
