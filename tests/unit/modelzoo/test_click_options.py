"""The options of the programs that train on clicks, and those of DeepRec's examples."""

from __future__ import annotations

import pytest

from common import click_options
from dlrm.train import Dlrm
from features.grouped_embedding import deeprec_options
from features.grouped_embedding.dcnv2.train import DcnV2
from features.grouped_embedding.deepfm.train import DeepFm

pytestmark = pytest.mark.usefixtures("no_sleep")


def parse(*arguments, model=Dlrm, rank=0):
    return click_options.parse(model.defaults, list(arguments), rank)


def test_defaults():
    options = parse()
    assert (options.mode, options.data, options.rows) == ("train", None, 200_000)
    assert (options.batch_size, options.optimizer) == (512, "adam")
    assert (options.save_steps, options.checkpoint_dir) == (None, None)


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["--mode", "evaluate"], "--mode evaluate needs --checkpoint-dir"),
        (["--mode", "export", "--checkpoint-dir", "x"], "--mode export needs --export-dir"),
        (["--mode", "predict", "--checkpoint-dir", "x"], "--mode predict needs --predictions"),
        (["--export-dir", "x"], "without --checkpoint-dir there is none"),
        (["--predictions", "x"], "--predictions is for --mode predict"),
        (
            ["--mode", "evaluate", "--checkpoint-dir", "x", "--losses", "y"],
            "--losses is for --mode train",
        ),
    ],
)
def test_what_does_not_go_together_is_said_on_rank_0(capsys, arguments, complaint):
    for rank in (0, 1):
        with pytest.raises(SystemExit) as ended:
            parse(*arguments, rank=rank)
        assert ended.value.code == 2
        errors = capsys.readouterr().err
        assert (complaint in errors) if rank == 0 else errors == ""


def test_deeprecs_names_mean_the_same():
    options = parse(
        *("--data_location", "d", "--batch_size", "64", "--checkpoint", "c", "--save_steps", "7"),
        *("--keep_checkpoint_max", "2", "--learning_rate", "0.5", "--use_feature_columns"),
        model=DcnV2,
    )
    assert (options.data, options.batch_size, options.checkpoint_dir) == ("d", 64, "c")
    assert (options.save_steps, options.keep_checkpoints) == (7, 2)
    assert options.learning_rate == 0.5 and options.own.use_feature_columns
    assert parse("--save_steps", "0", model=DcnV2).save_steps is None


@pytest.mark.parametrize("name", deeprec_options.NO_EFFECT)
def test_what_tunes_deeprec_is_said_to_have_no_effect(capsys, name):
    parse(name, "1", model=DeepFm)
    assert f"{name} has no effect here: " in capsys.readouterr().err
    parse(name, "1", model=DeepFm, rank=1)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", [*deeprec_options.REFUSED, *deeprec_options.REFUSED_FLAGS])
def test_what_would_change_numbers_is_refused(capsys, name):
    is_flag = name in deeprec_options.REFUSED_FLAGS
    with pytest.raises(SystemExit):
        parse(*([name] if is_flag else [name, "True"]), model=DcnV2)
    assert f"{name} isn't here: " in capsys.readouterr().err
    if not is_flag:
        parse(name, "False", model=DcnV2)


def test_filters_are_for_dynamic_tables(capsys):
    with pytest.raises(SystemExit):
        parse("--ev_filter", "counter", model=DeepFm)
    assert "add --ev True" in capsys.readouterr().err
    assert parse("--ev", "True", "--ev_filter", "cbf", model=DeepFm).own.ev
    assert not parse("--ev", "False", model=DeepFm).own.ev
