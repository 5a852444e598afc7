"""A job file becomes the command line and the variables that its keys stand for, or is refused."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

import collective
from collective.job.errors import UsageError
from collective.launch import cli
from collective.launch.cli import emitted, environment_of, make_plan, parse_options
from collective.launch.job_file import job as job_file
from collective.launch.job_file.model import JobFile
from collective.options import ScopeOptions, declaration

# Determined's own example, from its guide to the Trainer.
DETERMINED = """\
name: my_pytorch_trainer_trial
hyperparameters:
  global_batch_size: 32
searcher:
  name: single
  metric: validation_loss
  max_length:
    batches: 937
resources:
  slots_per_trial: 8
entrypoint: python3 -m determined.launch.torch_distributed python3 train.py
"""
FULL = """\
name: Census Income
entrypoint: train.py --title "two words"
slots: 3
hosts: [h1:2, h2:1]
seed: 7
hyperparameters: {global_batch_size: 64, lr: {type: const, val: 0.5}, layers: [8, 4]}
environment: {GREETING: hello there, NUMBER: 3}
max_length: {epochs: 2}
records_per_epoch: 640
checkpoints:
  folder: out
  period: {batches: [2, 5]}
  policy: all
  keep: 3
  start: other
  continue_id: first
metrics:
  port: 127.0.0.1:9400
  validation_period: {records: 100}
  reporting_period: {seconds: 1.5}
  step_zero_validation: true
searcher: {name: single, metric: auc, smaller_is_better: false}
data_loaders: {count: 2, script: loader.py --rows 'a b'}
max_restarts: 2
log_policies:
- {pattern: out of memory, action: cancel_retries}
- {name: ECC, pattern: -dashed, action: {type: exclude_node}}
strategy: {backend: sok, local_steps: 4, profile_steps: [2, 3]}
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("PET_NNODES", "PET_NODE_RANK", "CUDA_VISIBLE_DEVICES", "COLLECTIVE_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(cli, "driver_gpus", lambda: ())
    Path("train.py").touch()


def options_of(text: str, *words: str) -> Any:
    Path("job.yaml").write_text(text, encoding="utf-8")
    return parse_options(["job.yaml", *words])


def info_of(text: str, *words: str) -> collective.JobInfo:
    """Returns what a rank of the job is told."""
    return collective.job_info(environment_of(options_of(text, *words)))


def complaint(text: str, *words: str) -> str:
    with pytest.raises(UsageError) as raised:
        options_of(text, *words)
    return str(raised.value)


def job(**keys: Any) -> str:
    return yaml.safe_dump({"entrypoint": "train.py", **keys}, sort_keys=False)


def test_each_key_is_an_option_a_variable_or_an_argument():
    options = options_of(FULL)
    assert (options.ranks, options.hosts, options.max_restarts) == ("3", "h1:2,h2:1", 2)
    assert options.no_restart_after == ["out of memory"]
    assert options.metrics_port == "127.0.0.1:9400"
    assert options.data_loaders == ["2", "loader.py --rows 'a b'"]
    assert options.leave_out_host_after == ["-dashed"]
    assert options.command == ("train.py", "--title", "two words")
    variables = environment_of(options)
    assert (variables["GREETING"], variables["NUMBER"]) == ("hello there", "3")
    assert variables["COLLECTIVE_STRATEGY"] == "sok"
    info = info_of(FULL)
    assert info.hyperparameters == {"global_batch_size": 64, "lr": 0.5, "layers": [8, 4]}
    expected = yaml.safe_load(FULL)
    del expected["environment"], expected["hyperparameters"]
    expected["entrypoint"] = shlex.join(["train.py", "--title", "two words"])
    expected["log_policies"][1]["action"] = "exclude_node"
    assert info.config == expected


def test_every_key_is_in_that_test():
    def places(model, above=()):
        for name, field in model.model_fields.items():
            inner = getattr(field.annotation, "model_fields", None)
            if inner and field.annotation.__name__ != "Length":
                yield from places(field.annotation, (*above, name))
            else:
                yield (*above, name)

    of_others = {other for _, other in JobFile.PLACES}
    of_determined = {"resources", "reproducibility", "checkpoint_storage"}
    idle = {"description", "labels", "workspace", "project", "scheduling_unit"}
    of_search = {"searcher.max_trials", "searcher.max_concurrent_trials"}
    given = yaml.safe_load(FULL)
    for place in places(JobFile):
        if place[0] in of_determined | idle or ".".join(place) in of_others | of_search:
            continue
        value = given
        for key in place:
            assert key in value, place
            value = value[key]


def test_determineds_page_is_understood():
    options = options_of(DETERMINED)
    assert (options.ranks, options.command) == ("8", ("python3", "train.py"))
    info = info_of(DETERMINED)
    assert info.hyperparameters == {"global_batch_size": 32}
    assert info.config == {
        "name": "my_pytorch_trainer_trial",
        "entrypoint": "python3 train.py",
        "slots": 8,
        "max_length": {"batches": 937},
        "searcher": {"name": "single", "metric": "validation_loss"},
    }


@pytest.mark.parametrize(
    "theirs, ours",
    [
        ({"resources": {"slots_per_trial": 4}}, {"slots": 4}),
        ({"reproducibility": {"experiment_seed": 9}}, {"seed": 9}),
        ({"searcher": {"max_length": {"epochs": 3}}}, {"max_length": {"epochs": 3}}),
        ({"min_checkpoint_period": {"batches": 5}}, {"checkpoints": {"period": {"batches": 5}}}),
        (
            {"min_validation_period": {"records": 5}},
            {"metrics": {"validation_period": {"records": 5}}},
        ),
        ({"perform_initial_validation": True}, {"metrics": {"step_zero_validation": True}}),
        ({"checkpoint_policy": "all"}, {"checkpoints": {"policy": "all"}}),
        (
            {"checkpoint_storage": {"type": "shared_fs", "host_path": "/a", "storage_path": "b"}},
            {"checkpoints": {"folder": "/a/b"}},
        ),
        (
            {
                "checkpoint_storage": {
                    "type": "directory",
                    "container_path": "/c",
                    "save_trial_latest": 2,
                }
            },
            {"checkpoints": {"folder": "/c", "keep": 2}},
        ),
    ],
)
def test_determineds_spellings(theirs, ours):
    found = info_of(job(**theirs)).config
    assert found == {"entrypoint": "train.py", **ours}
    [key] = ours
    assert "which is there, too" in complaint(job(**theirs, **{key: ours[key]}))


def test_determineds_environment_and_its_idle_keys(capsys):
    text = job(environment={"environment_variables": ["A=b=c", "D="]}, labels=["x"], project="y")
    options = options_of(text)
    assert environment_of(options)["A"] == "b=c" and environment_of(options)["D"] == ""
    assert cli.main(["job.yaml", "--dry-run"]) == 0
    assert "without effect: labels (" in capsys.readouterr().err


def test_one_trial_of_a_files_search(capsys):
    """As a search by Optuna starts it, of a file that is also for an OptimizationJob."""
    ranges = {"lr": {"type": "log", "minval": -3, "maxval": -1}}
    text = job(hyperparameters=ranges, searcher={"name": "random", "max_trials": 4})
    words = ["--set", "hyperparameters.lr=0.5", "--set", "searcher.name=single"]
    assert info_of(text, *words).hyperparameters == {"lr": 0.5}
    assert cli.main(["job.yaml", *words, "--dry-run"]) == 0
    why = "without effect: searcher.max_trials ('single' has one trial)"
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(
    "entrypoint, command",
    [
        ("train.py", ["train.py"]),
        ("python3 -u train.py --lr 1", ["python3", "-u", "train.py", "--lr", "1"]),
        (["train.py", "two words"], ["train.py", "two words"]),
        ("python3 -m determined.launch.horovod python3 train.py", ["python3", "train.py"]),
        ("python -m determined.launch.torch_distributed -- train.py", ["train.py"]),
        ("-m package.train x", ["-m", "package.train", "x"]),
    ],
)
def test_the_command_of_a_rank(entrypoint, command):
    assert list(options_of(job(entrypoint=entrypoint)).command) == command


@pytest.mark.parametrize(
    "entrypoint, words",
    [
        ("model_def:Trial", "model_def:Trial is a Trial class"),
        ("python3 -m determined.launch.horovod --trial m:T", "m:T is a Trial class"),
        ("python3 -m determined.launch.horovod --fusion 1 -- train.py", "--fusion is an option of"),
        ("python3 -m determined.launch.horovod", "names no script"),
        ("train.py 'x", "No closing quotation"),
        ("other.yaml", "other.yaml is a job file"),
    ],
)
def test_a_command_that_is_none_here(entrypoint, words):
    assert words in complaint(job(entrypoint=entrypoint))


def test_the_command_line_wins():
    options = options_of(FULL, "-np", "1", "--max-restarts", "0", "-H", "h9:1", "--tee", "0")
    assert (options.ranks, options.max_restarts, options.hosts) == ("1", 0, "h9:1")
    Path("job.yaml").write_text(job(slots=3))
    assert parse_options(["--device", "cpu", "job.yaml", "-np=2"]).ranks == "2"
    assert make_plan(parse_options(["--device", "cpu", "job.yaml"]), {}).size == 3


@pytest.mark.parametrize(
    "setting, place, value",
    [
        ("lr=0.1", ["lr"], 0.1),
        ("lr=1e-05", ["lr"], 1e-05),  # as Python writes it; YAML 1.1 would read a text
        ("lr=1.0e-3", ["lr"], 0.001),
        ("name=1e-x", ["name"], "1e-x"),
        ("layers=[8, 4]", ["layers"], [8, 4]),
        ("inner.name=a=b", ["inner", "name"], "a=b"),
        ("text='1'", ["text"], "1"),
    ],
)
def test_values_that_are_set(setting, place, value):
    for words in (["--set", f"hyperparameters.{setting}"], [f"--set=hyperparameters.{setting}"]):
        found = info_of(job(hyperparameters={"lr": 5}), *words).hyperparameters
        for key in place:
            found = found[key]
        assert found == value and type(found) is type(value)


def test_a_value_may_be_set_where_there_is_no_section_and_twice():
    config = info_of(job(), "--set", "checkpoints.keep=3", "--set", "checkpoints.keep=4").config
    assert config["checkpoints"] == {"keep": 4}
    assert "--set" not in " ".join(options_of(job(), "--set", "slots=1").words)


# What is in the file, after its first line, and a part of the message.
REFUSED = {
    "an unknown key": ("slot: 2", "line 2: slot: there is no such key. Did you mean 'slots'?"),
    "slots": ("slots: 0", "line 2: slots: it should be a whole number from 1, or auto, gpu or cpu"),
    "a bare length": ("max_length: 5", "line 2: max_length: keys with values belong here, not 5"),
    "a unit": (
        "max_length:\n  batch: 5",
        "line 3: max_length.batch: there is no such key. Did you mean 'batches'?",
    ),
    "two units": (
        "max_length: {batches: 5, epochs: 1}",
        "line 2: max_length: one unit belongs here",
    ),
    "an amount": (
        "max_length: {batches: 0}",
        "line 2: max_length.batches: it should be a whole number from 1, or a list of them, not 0",
    ),
    "forever": ("max_length: {seconds: .inf}", "max_length.seconds: it should be a finite number"),
    "positions": ("max_length: {batches: [1]}", "line 2: max_length: it is one number"),
    "a policy": ("checkpoints: {policy: bst}", "checkpoints.policy: it should be 'best', 'all' or"),
    "a port": (
        "metrics: {port: 70000}",
        "line 2: metrics.port: it should be a port from 0 to 65535, or ADDRESS:PORT, not 70000",
    ),
    "no loaders": (
        "data_loaders: {count: 0, script: l.py}",
        "line 2: data_loaders.count: it should be greater than or equal to 1, not 0",
    ),
    "no port": ("metrics: {port: [1]}", "metrics.port: it should be a port from 0 to 65535"),
    "a search": (
        "searcher:\n  name: adaptive_asha",
        "line 3: searcher.name: 'adaptive_asha' is a search: a launch trains once, and a library",
    ),
    "a grid": ("searcher: {name: grid}", "searcher.name: 'grid' is a search"),
    "a range": (
        "hyperparameters:\n  lr: {type: double, minval: 0, maxval: 1}",
        "line 3: hyperparameters.lr: it is a range. Give one value, as --set hyperparameters.lr=",
    ),
    "half a range": (
        "hyperparameters: {lr: {type: double, minval: 0}}",
        "hyperparameters.lr.maxval: it is missing; a double has maxval, minval",
    ),
    "an empty range": (
        "hyperparameters: {n: {type: int, minval: 3, maxval: 3}}",
        "hyperparameters.n.maxval: it is 3, not more than minval, 3",
    ),
    "a date": ("hyperparameters: {day: 2026-01-01}", "hyperparameters.day: a rank gets it as JSON"),
    "a batch": (
        "hyperparameters: {global_batch_size: 1.5}",
        "hyperparameters.global_batch_size: it is a whole number from 1",
    ),
    "a host": ("hosts: [a, 'b c']", "line 2: hosts.1: a host is a name, or a name and how many"),
    "a boolean variable": ("environment: {A: true}", "environment.A: a variable's value is a text"),
    "the launcher's": ("environment: {RANK: 1}", "environment.RANK: the launcher sets it"),
    "an image": ("environment: {image: x}", "environment.image: it is Determined's: give --image"),
    "a variable's name": ("environment: {a-b: 1}", "'a-b' names no environment variable"),
    "a pattern": (
        "max_restarts: 1\nlog_policies: [{pattern: '(', action: cancel_retries}]",
        "line 3: log_policies.0.pattern: it should be a regular expression",
    ),
    "an action": (
        "max_restarts: 1\nlog_policies: [{pattern: a, action: {type: retry}}]",
        "log_policies.0.action: it should be 'cancel_retries' or 'exclude_node', not 'retry'",
    ),
    "policies of no restart": (
        "log_policies: [{pattern: a, action: cancel_retries}]",
        "line 2: log_policies: they are about restarts: give max_restarts, too",
    ),
    "an option": (
        "strategy: {locl_steps: 2}",
        "strategy.locl_steps: strategy.scope() has no such option. Did you mean 'local_steps'?",
    ),
    "an option's value": (
        "strategy: {local_steps: 0}",
        "strategy.local_steps: it is a whole number from 1, not 0",
    ),
    "a backend": ("strategy: {backend: ps}", "strategy.backend: it is one of hb, sok, not 'ps'"),
    "storage without a folder": (
        "checkpoint_storage: {type: shared_fs}",
        "checkpoint_storage: it names no folder",
    ),
    "other storage": ("checkpoint_storage: {type: s3}", "it should be 'shared_fs' or 'directory'"),
    "best of an experiment": (
        "checkpoint_storage: {type: shared_fs, host_path: a, save_experiment_best: 1}",
        "checkpoint_storage.save_experiment_best: a job is no experiment",
    ),
    "no YAML": ("a: [", "job.yaml, line 3: while parsing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_has_its_line(case):
    text, words = REFUSED[case]
    assert words in complaint(f"entrypoint: train.py\n{text}\n")


@pytest.mark.parametrize(
    "setting, words",
    [
        ("slots", "--set slots: give KEY=VALUE"),
        ("a..b=1", "give KEY=VALUE"),
        ("slots=0", "--set slots=0: slots: it should be a whole number from 1"),
        ("slot=1", "--set slot=1: slot: there is no such key. Did you mean 'slots'?"),
        ("slots=[", "--set slots=[, line 1: "),
        ("entrypoint.x=1", "job.yaml has 'train.py' where 'x' would be a key of it"),
        ("searcher.name=random", "--set searcher.name=random: searcher.name: 'random' is a search"),
    ],
)
def test_what_is_set_wrongly_is_named(setting, words):
    assert words in complaint(job(), "--set", setting)


def test_a_job_without_a_command_or_a_file():
    assert "entrypoint: this key is missing" in complaint("name: x\n")
    with pytest.raises(UsageError, match="none.yaml can't be read: No such file"):
        parse_options(["none.yaml"])
    assert "x after job.yaml: a job file takes --set" in complaint(job(), "x")
    with pytest.raises(UsageError, match="--set a=1 is for a job file"):
        parse_options(["--set", "a=1", "train.py"])


@pytest.mark.parametrize("text", [FULL, DETERMINED])
def test_the_resolved_job_is_a_job_file_of_the_same_job(text):
    options = options_of(text)
    first, *lines = options.job.describe().splitlines()
    assert first == "job          job.yaml, resolved:"
    again = options_of("\n".join(line.removeprefix("  ") for line in lines))
    assert (again.words, again.command) == (options.words, options.command)
    assert environment_of(again) == environment_of(options)


def test_dry_run_prints_the_job_and_the_plan(capsys):
    Path("job.yaml").write_text(job(slots=2, hyperparameters={"lr": 0.5}))
    words = ["--device", "cpu", "job.yaml", "--set", "hyperparameters.lr=0.1", "--dry-run"]
    assert cli.main(words) == 0
    text = capsys.readouterr().out
    assert "  hyperparameters:\n    lr: 0.1\nranks        2\n" in text
    assert f"command      {sys.executable} train.py" in text


def test_a_job_that_a_rank_starts_is_not_its_own(monkeypatch):
    outer = environment_of(options_of(job(slots=2)))
    monkeypatch.setenv("COLLECTIVE_JOB_FILE", outer["COLLECTIVE_JOB_FILE"])
    inner = parse_options(["train.py"])
    assert environment_of(inner)["COLLECTIVE_JOB_FILE"]  # that of a manifest
    monkeypatch.setenv("COLLECTIVE_LAUNCHED", "1")
    assert "COLLECTIVE_JOB_FILE" not in environment_of(inner)
    assert json.loads(environment_of(options_of(job(slots=1)))["COLLECTIVE_JOB_FILE"]) == {
        "entrypoint": "train.py",
        "slots": 1,
    }


def test_slots_are_of_all_hosts():
    """Launchers that are started on each host, or by a scheduler, take their share."""
    text = job(slots=6, hosts=["a:2", "b:4"])
    nodes = ["--nnodes", "3", "--node-rank", "0", "--master-addr", "a"]
    assert options_of(job(slots=6), *nodes).ranks == "2"
    assert "slots: 6 ranks can't be dealt evenly to 4 hosts" in complaint(
        job(slots=6), "--nnodes", "4"
    )
    assert (options_of(text).ranks, options_of(text).hosts) == ("6", "a:2,b:4")
    emitting = options_of(text, "--emit", "slurm")
    assert (emitting.ranks, emitting.hosts, emitting.replicas) == ("3", None, 2)
    emitting = options_of(text, "--emit", "slurm", "--replicas", "3")
    assert (emitting.ranks, emitting.replicas) == ("2", 3)


def test_a_manifest_needs_no_job_file():
    text = job(name="Census Income", slots=2, hyperparameters={"lr": 0.5}, environment={"A": "b c"})
    script = emitted(options_of(text, "--emit", "slurm"))
    assert "#SBATCH --job-name=census-income\n" in script and "export A='b c'\n" in script
    assert "launcher \\\n    -np 2 train.py &" in script and "job.yaml" not in script
    [line] = [line for line in script.splitlines() if "COLLECTIVE_HYPERPARAMETERS" in line]
    assert json.loads(shlex.split(line)[1].partition("=")[2]) == {"lr": 0.5}


def test_the_schema_has_every_key_and_what_it_is(capsys):
    assert cli.main(["--job-schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["required"] == ["entrypoint"] and not schema["additionalProperties"]
    assert set(schema["properties"]) == set(JobFile.model_fields)
    options = schema["properties"]["strategy"]["properties"]
    assert set(options) == {"backend", *declaration.names(ScopeOptions)}
    assert "k, the number of batches per update" in options["local_steps"]["description"]
    if sys.version_info >= (3, 10):
        assert options["plan"]["enum"] == ["print", "quiet", "full"]
    assert schema["properties"]["slots"]["anyOf"][1] == {"enum": ["auto", "gpu", "cpu"]}


def test_every_argument_of_the_file_is_documented():
    """The docstrings are the schema's descriptions."""
    text = job_file.schema()
    for name in JobFile.model_fields:
        if name not in {other.split(".")[0] for _, other in JobFile.PLACES} and name not in (
            "description",
            "labels",
            "workspace",
            "project",
            "scheduling_unit",
        ):
            assert f"\\n    {name}: " in text, name


# Keys of the file and of its sections, and some that are nowhere.
KEYS = sorted(
    {*JobFile.model_fields, *yaml.safe_load(FULL), "slot", "7", "on"}
    | {key for value in yaml.safe_load(FULL).values() if isinstance(value, dict) for key in value}
    | {"batches", "seconds", "type", "minval", "maxval", "vals", "val", "pattern", "action"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 3),
    st.floats(),
    st.sampled_from(["train.py", "auto", "single", "best", "int", "const", "(", "h1:8", "", "ü"]),
    st.dates(),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3)
    ),
    max_leaves=8,
)
SETTINGS = st.lists(
    st.builds(
        lambda keys, value: f"{'.'.join(keys)}={value}",
        st.lists(st.sampled_from(KEYS), min_size=1, max_size=3),
        st.sampled_from(["1", "[1]", "{batches: 2}", "a", "", "1e-3", "'", "[", "!!x y", "&a *a"]),
    ),
    max_size=2,
)


@hypothesis.settings(deadline=None)
@hypothesis.given(
    st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5), SETTINGS, st.booleans()
)
def test_whatever_is_in_a_file_it_is_a_job_or_an_error_with_its_place(keys, settings, searches):
    """The job is the same after it was printed and read again."""
    Path("job.yaml").write_text(yaml.safe_dump({"entrypoint": "train.py", **keys}), "utf-8")
    emits = "optimizationjob" if searches else None
    try:
        read = job_file.read_job("job.yaml", settings, emits=emits)
    except UsageError as error:
        places = ("job.yaml, line ", "job.yaml: ", "--set ")
        assert all(line.startswith(places) for line in str(error).splitlines()), error
        return
    Path("again.yaml").write_text(
        "\n".join(line.removeprefix("  ") for line in read.describe().splitlines()[1:]), "utf-8"
    )
    again = job_file.read_job("again.yaml", emits=emits)
    assert (again.words, again.command) == (read.words, read.command)
    assert again.environment == read.environment


@hypothesis.settings(deadline=None)
@hypothesis.given(st.text(max_size=60))
def test_any_text_is_a_job_or_an_error(text):
    Path("job.yaml").write_text(f"entrypoint: train.py\n{text}", "utf-8")
    try:
        job_file.read_job("job.yaml")
    except UsageError as error:
        assert all(line.startswith("job.yaml") for line in str(error).splitlines()), error
