"""PERSIA's files are read as they are; what is wrong in them is said with its line, all at once."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import warnings

import hypothesis
import pytest
import yaml
from hypothesis import strategies as st

import collective
from collective import features, yaml_file
from collective.features.global_config import NO_EFFECT, GlobalConfig
from collective.features.slots import Slots

# PERSIA's defaults (persia-embedding-config/src/lib.rs).
SLOT = {
    "sample_fixed_size": 10,
    "embedding_summation": True,
    "sqrt_scaling": False,
    "hash_stack_config": {"hash_stack_rounds": 0, "embedding_size": 0},
    "index_prefix": 0,
}
GLOBAL = {
    "common_config": {
        "metrics_config": {
            "enable_metrics": True,
            "job_name": "persia_default_jobname",
            "push_interval_seconds": 10,
        },
        "job_type": "Train",
        "infer_config": {"servers": [], "embedding_checkpoint": ""},
        "checkpointing_config": {"num_workers": 4},
    },
    "embedding_parameter_server_config": {
        "capacity": 1_000_000_000,
        "num_hashmap_internal_shards": 100,
        "enable_incremental_update": False,
        "incremental_buffer_size": 1_000_000,
        "incremental_dir": "/workspace/incremental_dir/",
        "incremental_channel_capacity": 1000,
    },
    "embedding_worker_config": {"forward_buffer_size": 1000, "buffered_data_expired_sec": 1000},
}


def slots(text: str) -> Slots:
    return yaml_file.parse(text, "f.yml", Slots)


def message(text: str, model: type = Slots) -> str:
    with pytest.raises(ValueError) as caught:
        yaml_file.parse(text, "f.yml", model)
    return str(caught.value)


@pytest.mark.parametrize("spelling", ["slots_config", "slot_configs", "slot_config"])
def test_defaults_and_spellings(spelling: str):
    found = slots(f"{spelling}:\n  user: {{dim: 8}}\n").model_dump()
    assert found == {
        "feature_index_prefix_bit": 8,
        "slots_config": {"user": {"dim": 8, **SLOT}},
        "feature_groups": {},
    }


def test_a_file_with_all_keys(tmp_path):
    path = tmp_path / "embedding_config.yml"
    path.write_text(
        "feature_index_prefix_bit: 12\n"
        "slots_config:\n"
        "  item: {dim: 8, embedding_summation: false, sample_fixed_size: 4}\n"
        "  seen: {dim: 8, sqrt_scaling: true}\n"
        "  on: {dim: 2, hash_stack_config: {hash_stack_rounds: 2, embedding_size: 10}}\n"
        "feature_groups: {items: [seen, item]}\n"
    )
    found = features.load(path)
    assert found.dimensions() == {"items": 8, "on": 2}
    assert [found.table_of(name) for name in found.slots_config] == ["items", "items", "on"]
    assert (found.slots_config["on"].rounds, found.slots_config["item"].rounds) == (2, 0)


def test_the_order_of_the_file_changes_no_table():
    names = "abcd"
    texts = [
        "slots_config:\n" + "".join(f"  {name}: {{dim: 2}}\n" for name in order) + groups
        for order, groups in (
            (names, "feature_groups: {x: [a, b], y: [d]}"),
            (names[::-1], "feature_groups: {y: [d], x: [b, a]}"),
        )
    ]
    first, second = (list(slots(text).dimensions().items()) for text in texts)
    assert first == second == [("c", 2), ("x", 2), ("y", 2)]


@pytest.mark.parametrize(
    "text, found",
    [
        ("slots_config:\n  a:\n    dim: 8\n    dimm: 2\n", "line 4: slots_config.a.dimm: .*'dim'"),
        ("slots_config: {a: {dim: 1}}\nfeature_group: {}", "line 2: feature_group: .*_groups'"),
        (
            "slot_config:\n  a: {dim: 1}\nslots_config: {}",
            "line 1: slot_config: .*other spelling",
        ),
        ("slots_config:\n  a:\n    sqrt_scaling: true", "line 2: slots_config.a.dim: .*missing"),
        ("slots_config:\n  a:\n    dim: 0", "line 3: slots_config.a.dim: .*equal to 1, not 0"),
        ("slots_config:\n  a:\n    dim: '8'", "line 3: .*integer, not '8'"),
        ("slots_config:\n  a: {dim: 1}\n  a: {dim: 2}", "line 3: the key 'a' occurs twice"),
        ("slots_config:\n  a:\n", "line 2: slots_config.a: keys with values .* not nothing"),
        ("slots_config:\n  ü: {dim: 1}", "line 2: slots_config.ü: a name names a variable"),
        ("slots_config:\n  a: {dim: 1}\n  A: {dim: 1}", "line 3: .* only in case"),
        ("slots_config:\n  a: {dim: 1, index_prefix: 3}", "line 2: .*index_prefix"),
        (
            "slots_config:\n  a:\n    dim: 1\n    hash_stack_config:\n      hash_stack_rounds: 2",
            "line 4: slots_config.a.hash_stack_config.embedding_size: .*from 1",
        ),
        (
            "slots_config: {a: {dim: 1}, bb: {dim: 2}}\nfeature_groups:\n  g:\n  - a\n  - bb",
            "line 5: feature_groups.g.1: slot 'a' has dim 1, and 'bb' 2",
        ),
        (
            "slots_config: {aa: {dim: 1}}\nfeature_groups: {g: [aaa]}",
            "line 2: .*no slot 'aaa'. Did you mean 'aa'",
        ),
        (
            "slots_config: {a: {dim: 1}}\nfeature_groups: {g: [a], h: [a]}",
            "line 2: feature_groups.g.0: slot 'a' is listed 2 times",
        ),
        (
            "slots_config: {a: {dim: 1}, b: {dim: 1}}\nfeature_groups: {a: [b]}",
            "line 2: feature_groups.a: a slot has this name",
        ),
        (
            "slots_config:\n  a: {dim: 1}\n  b: {dim: 1, hash_stack_config: {hash_stack_rounds: 1, "
            "embedding_size: 2}}\nfeature_groups: {g: [a, b]}",
            "line 4: .*hash ids differently",
        ),
        (
            "feature_index_prefix_bit: 1\nslots_config: {a: {dim: 1}, b: {dim: 1}}",
            "line 1: feature_index_prefix_bit: too few bits for 2 tables",
        ),
        ("feature_index_prefix_bit: 0\nslots_config: {a: {dim: 1}}", "line 1: .*equal to 1"),
        ("", "line 1: the file: keys with values"),
        ("slots_config: {}", "line 1: slots_config: keys with values belong here, not {}"),
        ("slots_config: [", "line 1: while parsing"),
        ("a: 1\n---\nb: 1", "line 2: .*another document"),
        ("slots_config: {a: {dim: !!python/object:os.system 8}}", "line 1: could not determine"),
        ("[" * 5000, "nested too deeply"),
        ("slots_config: {a: {dim: 2020-13-45}}", "f.yml: month"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(text: str, found: str):
    assert re.search(found, message(text)), message(text)


def test_all_errors_are_said_at_once():
    lines = message("slots_config:\n  a: {dim: 0}\n  b: {dimm: 1}\nx: 1").splitlines()
    assert [line.split(":")[0] for line in lines] == [f"f.yml, line {i}" for i in (2, 3, 3, 4)]


def test_a_missing_file_is_an_error_at_once(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.yml"):
        features.load(tmp_path / "nowhere.yml")
    (tmp_path / "latin.yml").write_bytes(b"slots_config:\n  \xe4: {dim: 1}\n")
    with pytest.raises(ValueError, match="latin.yml, line 2: the text isn't in UTF-8"):
        features.load(tmp_path / "latin.yml")


@hypothesis.given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "slots_config",
                        "slot_config",
                        "feature_groups",
                        "a",
                        "b",
                        "dim",
                        "sqrt_scaling",
                    ]
                    + ["hash_stack_config", "hash_stack_rounds", "embedding_size", "common_config"]
                )
                | st.text(max_size=3),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    st.integers(0, 200),
    st.characters(),
)
@hypothesis.settings(deadline=None)
def test_any_file_is_read_or_refused_with_its_name(value, place, character):
    """Also with a character changed in it."""
    text = yaml.safe_dump(value, allow_unicode=True)
    for each in (text, text[:place] + character + text[place + 1 :]):
        for model in (Slots, GlobalConfig):
            try:
                assert isinstance(yaml_file.parse(each, "f.yml", model), model)
            except yaml_file.FileError as error:
                assert all(line.startswith("f.yml") for line in str(error).splitlines())


# ---- global_config.yml

# As PERSIA's examples have it.
EXAMPLE = """
common_config:
  metrics_config:
    enable_metrics: false
    push_interval_sec: 20
  job_type: Train
  checkpointing_config:
    num_workers: 8
embedding_parameter_server_config:
  capacity: 1000000
  num_hashmap_internal_shards: 1
  enable_incremental_update: false
  incremental_buffer_size: 5000000
  incremental_channel_capacity: 1000
embedding_worker_config:
  forward_buffer_size: 1000
"""


def config(text: str) -> GlobalConfig:
    return yaml_file.parse(text, "f.yml", GlobalConfig)


def test_its_defaults():
    assert config("{}").model_dump() == GLOBAL
    assert config("{}").policy() == collective.TablePolicy()
    assert config("{}").session_options() == {
        "save_summaries_steps": None,
        "save_summaries_secs": 10,
    }


def test_each_of_its_keys_is_something_here_or_is_named(tmp_path):
    path = tmp_path / "global_config.yml"
    path.write_text(EXAMPLE)
    with pytest.warns(UserWarning, match="global_config.yml: without effect") as caught:
        found = features.load_global(path)
    (warning,) = caught
    idle = found.without_effect()
    assert all(f"{place} ({why})" in str(warning.message) for place, why in idle.items())
    assert set(idle) == {
        "common_config.checkpointing_config.num_workers",
        "embedding_parameter_server_config.num_hashmap_internal_shards",
        "embedding_parameter_server_config.incremental_buffer_size",
        "embedding_parameter_server_config.incremental_channel_capacity",
        "embedding_worker_config.forward_buffer_size",
    }
    assert found.mode == "train"
    assert found.policy(servers=2).capacity == 2_000_000
    bounded = found.policy(collective.EmbeddingConfig())
    assert (bounded.capacity, bounded.weight_bound) == (1_000_000, 10)
    assert found.session_options()["save_summaries_secs"] is None
    text = "common_config: {metrics_config: {push_interval_sec: 20}}"
    assert config(text).session_options()["save_summaries_secs"] == 20


def test_every_key_is_mapped_refused_or_without_effect():
    """No key of the model is forgotten."""
    mapped = {
        "common_config.metrics_config.enable_metrics",
        "common_config.metrics_config.push_interval_seconds",
        "common_config.job_type",
        "embedding_parameter_server_config.capacity",
        "embedding_parameter_server_config.enable_incremental_update",
    }
    refused = {f"common_config.infer_config.{key}" for key in ("servers", "embedding_checkpoint")}

    def leaves(value, place=()):
        if not isinstance(value, dict):
            yield ".".join(place)
            return
        for key, inner in value.items():
            yield from leaves(inner, (*place, key))

    assert sorted(leaves(GLOBAL)) == sorted([*mapped, *refused, *NO_EFFECT])


@pytest.mark.parametrize("word, mode", [("Train", "train"), ("Eval", "eval"), ("Infer", "infer")])
def test_job_types_are_modes(word: str, mode: str):
    assert config(f"common_config: {{job_type: {word}}}").mode == mode


def test_increments():
    found = config("embedding_parameter_server_config: {enable_incremental_update: true}")
    options = found.session_options(increment_secs=30)
    assert options["save_incremental_checkpoint_secs"] == 30


@pytest.mark.parametrize(
    "text, found",
    [
        ("infer_config:\n    servers: [a:1]", "line 3: .*servers: no servers answer"),
        ("infer_config:\n    embedding_checkpoint: /a", "line 3: .*export_saved_model"),
        ("job_type: Serve", "line 2: .*'Train', 'Eval' or 'Infer', not 'Serve'"),
        ("job_typ: Train", "line 2: .*Did you mean 'job_type'"),
    ],
)
def test_what_is_not_here_is_refused(text: str, found: str):
    said = message(f"common_config:\n  {text}", GlobalConfig)
    assert re.search(found, said), said


def test_a_file_without_idle_keys_warns_of_nothing(tmp_path):
    path = tmp_path / "global_config.yml"
    path.write_text("common_config: {job_type: Train}")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        features.load_global(path)


# ---- Loading, schemas


def test_it_loads_pydantic_when_a_name_is_used():
    program = (
        "import sys, collective, collective.features\n"
        "print(*{'pydantic', 'tensorflow'} & {*sys.modules})\n"
        "collective.features.load\n"
        "print(*sorted({'pydantic', 'tensorflow'} & {*sys.modules}))\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout
    assert out.splitlines() == ["", "pydantic"]


@pytest.mark.parametrize("name, key", [("slots", "slots_config"), ("global", "common_config")])
def test_the_schema_is_printed(name: str, key: str):
    command = [sys.executable, "-m", "collective.features", "schema", name]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    schema = json.loads(out)
    assert key in schema["properties"] and schema["additionalProperties"] is False
