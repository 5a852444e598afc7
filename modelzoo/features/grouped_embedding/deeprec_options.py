"""Adds the options of DeepRec's grouped_embedding examples, by their own names.

Those that this program has under another name do the same. Those that tune DeepRec are accepted,
and a line on stderr says that they have no effect. Those that would change numbers and aren't here
are refused.
"""

from __future__ import annotations

import argparse
from typing import Any

from common.command_line import TrainingParser, positive_number, whole_number

# DeepRec's name: this program's option, its type. --batch_size is there a rank's own.
SAME = {
    "--data_location": ("data", str),
    "--batch_size": ("batch_size", whole_number(1)),
    "--checkpoint": ("checkpoint_dir", str),
    "--save_steps": ("save_steps", whole_number(0)),
    "--keep_checkpoint_max": ("keep_checkpoints", whole_number(1)),
    "--learning_rate": ("learning_rate", positive_number),
}
# With a value each.
NO_EFFECT = {
    "--smartstaged": "datasets prefetch anyway",
    "--emb_fusion": "lookups share exchanges and are compiled operations anyway",
    "--op_fusion": "TensorFlow's own graph optimizer fuses what it can",
    "--workqueue": "rows are dealt to the ranks anyway, each to one",
    "--parquet_dataset": "train.parquet and eval.parquet are read where they are there",
    "--parquet_dataset_shuffle": "rows are shuffled anyway",
    "--input_layer_partitioner": "tables are sharded over all ranks anyway",
    "--dense_layer_partitioner": "the network is whole on every rank",
    "--protocol": "there are no parameter servers",
    "--inter": "the launcher divides the machine's cores between its ranks",
    "--intra": "the launcher divides the machine's cores between its ranks",
    "--timeline": "scope(profile=…) measures where the time of a step goes",
    "--profile_every_n_iter": "scope(profile=…) measures where the time of a step goes",
    "--eval_every_n_iter": "it evaluates at the end",
    "--incremental_ckpt": "a checkpoint is whole anyway",
}
# Refused where their value isn't one of OFF.
REFUSED = {
    "--micro_batch": "scope(local_steps=k) makes an update of k batches",
    "--adaptive_emb": "there are no adaptive embeddings",
    "--dynamic_ev": "rows of a table have one dimension",
}
OFF = ("false", "0", "none", "")
REFUSED_FLAGS = {
    "--bf16": "the network computes in float32; scope(wire_dtype='bfloat16') is for what travels",
    "--tf": "start the program without the launcher: it is then one rank",
}


class _NoEffect(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, name: str | None = None) -> None:
        parser.remark(f"{name} has no effect here: {NO_EFFECT[str(name)]}")


class _Refused(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, name: str | None = None) -> None:
        why = REFUSED.get(str(name)) or REFUSED_FLAGS[str(name)]
        if values == [] or str(values).lower() not in OFF:
            parser.error(f"{name} isn't here: {why}")


class _SaveSteps(argparse.Action):
    """Saves at the end only where there are 0 steps between."""

    def __call__(self, parser: Any, namespace: Any, values: Any, name: str | None = None) -> None:
        setattr(namespace, self.dest, values or None)


def add(parser: TrainingParser) -> None:
    """Adds all of them to a program's options."""
    group = parser.add_argument_group("options of DeepRec's examples")
    for name, (own, kind) in SAME.items():
        group.add_argument(
            name,
            dest=own,
            type=kind,
            default=argparse.SUPPRESS,
            action=_SaveSteps if own == "save_steps" else "store",
            help=f"the same as --{own.replace('_', '-')}",
        )
    for name, why in NO_EFFECT.items():
        group.add_argument(
            name, action=_NoEffect, dest="no_effect", default=argparse.SUPPRESS, help=_shown(why)
        )
    for name, why in REFUSED.items():
        group.add_argument(
            name, action=_Refused, dest="refused", default=argparse.SUPPRESS, help=f"refused: {why}"
        )
    for name, why in REFUSED_FLAGS.items():
        group.add_argument(
            name,
            action=_Refused,
            nargs=0,
            dest="refused",
            default=argparse.SUPPRESS,
            help=f"refused: {why}",
        )


def _shown(why: str) -> str:
    return f"no effect: {why}"
