"""A profile's inputs of the training, made from files alone; every rank makes its own.

Takes parameters and the profile's data folder; gives `Inputs`.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from eyas.console import console
from eyas.drafting.data import TrainingData, token_rows
from eyas.drafting.heads import make_head
from eyas.drafting.initial import start_from
from eyas.drafting.launching import Inputs
from eyas.params import DraftParams, Machine, TargetParams, TrainParams
from eyas.store.format import row_key
from eyas.store.reader import StoreReader
from eyas.tables import TOKENS, read_table
from eyas.targets.head import load_head
from eyas.targets.resolve import open_target
from eyas.vocabulary import load_vocabulary


def load_inputs(
    data: Path,
    machine: Machine,
    target_params: TargetParams,
    draft: DraftParams,
    params: TrainParams,
    temperature: float,
    sharers: int,
) -> Inputs:
    """Token rows, store, vocabulary and target of a profile, and a head: fresh, or started from a drafter.

    Args:
        data: the profile's folder of outputs.
        machine: how many processes read the store.
        target_params: where the target is.
        draft: the head's shape.
        params: of the optimisation.
        temperature: that sampled rows were answered with.
        sharers: ranks that share them.
    """
    directory, target = open_target(target_params, data / "target.json")
    table = read_table(data / "tokens" / "tokens.parquet", TOKENS)
    reader = StoreReader(data / "hidden_states")
    train_rows, heldout_rows = (
        token_rows(table, split, partial(row_key, reader.spec.fingerprint)) for split in ("train", "validation")
    )
    model = make_head(
        draft,
        directory,
        target["source"],
        load_vocabulary(data / "vocab" / "vocab.safetensors"),
        reader.spec.layers,
        ttt_steps=params.ttt_steps,
        seed=params.seed,
    )
    initial = start_from(model, draft)
    for line in initial.lines() if initial else []:
        console.print(line, markup=False, highlight=False)
    rows = TrainingData(reader, train_rows, heldout_rows, machine.readers(sharers))
    return Inputs(model, rows, params, load_head(directory), temperature, initial)
