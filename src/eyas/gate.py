"""The gate behind `eyas train --overfit-one`: one conversation learnt by heart must be accepted whole by real serving.

Takes a profile whose stages up to `vocab` have run; gives a `Verdict`. It changes no output of the pipeline: head and request lie in ``.work/<profile>/overfit``.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from eyas.benchmark.acceptance import Trace
from eyas.benchmark.methods import EAGLE3, Method
from eyas.benchmark.process import EngineProcess, Setting
from eyas.benchmark.prompts import Prompt
from eyas.console import console
from eyas.drafting.heads import export
from eyas.drafting.inputs import load_inputs
from eyas.drafting.overfit import Lesson, Verdict, choose_lesson, judge, learn
from eyas.drafting.ranks import training_device
from eyas.files import atomic_directory
from eyas.params import Machine, Profile, load_machine, load_profile
from eyas.stage import process_environment
from eyas.targets.resolve import open_target
from eyas.vocabulary import load_vocabulary


def overfit_one(profile: str) -> Verdict:
    """Train a head on one stored conversation, serve it with vLLM on that prompt, judge its acceptance.

    Args:
        profile: a name in ``params.yaml``; run from the root of the checkout.

    Raises:
        EyasError: an output is missing, no answer fits, the head does not learn it, or the engine fails.
    """
    params, machine = load_profile(profile), load_machine()
    work = Path(".work") / profile / "overfit"
    lesson = _teach(params, machine, Path("data") / profile, work / "head")
    trace = _serve(params, machine, Path("data") / profile, work, lesson)
    return judge(lesson.answer_ids, trace.token_ids, trace.accepted, _drafts(params))


def _teach(params: Profile, machine: Machine, data: Path, head: Path) -> Lesson:
    """Learn, and write the checkpoint; nothing of the model is left on a GPU."""
    drafts = _drafts(params)
    inputs = load_inputs(data, machine, params.target, params.draft, params.train, params.responses.temperature, 1)
    drafted_V = load_vocabulary(data / "vocab" / "vocab.safetensors").t2d_V
    with inputs.data.reader:
        lesson = choose_lesson(inputs.data, inputs.target, drafted_V, drafts, training_device())
    console.print(
        f"conversation {lesson.conversation_id[:12]}: {len(lesson.prompt_ids)} tokens of prompt, "
        f"{len(lesson.answer_ids)} of greedy answer"
    )
    learnt = learn(inputs.model, lesson, params.train, drafts)
    losses = ", ".join(f"{loss:.4f}" for loss in learnt.loss_by_depth)
    console.print(f"learnt in {learnt.steps} steps: every draft right at {drafts} depths, loss by depth {losses}")
    head.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(head) as folder:
        export(inputs.model, folder)
    inputs.model.to("cpu")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # the engine is to have the GPU
    return lesson


def _serve(params: Profile, machine: Machine, data: Path, work: Path, lesson: Lesson) -> Trace:
    """What each target step did."""
    directory, _ = open_target(params.target, data / "target.json")
    drafts = _drafts(params)
    method = Method(EAGLE3, drafts, {"method": "eagle3", "model": str(work / "head"), "num_speculative_tokens": drafts})
    setting = Setting(
        directory,
        params.target,
        machine,
        [Prompt("overfit", lesson.conversation_id, lesson.prompt_ids)],
        len(lesson.answer_ids),
        [1],
        work,
        work.parent / "logs" / "overfit.log",
    )
    os.environ.update(process_environment(machine))  # the engine's process takes it over
    console.print(f"serving it with vLLM, {drafts} drafts a step …")
    with EngineProcess(method, setting) as engine:
        engine.wait()
        (trace,) = engine.serve([0], 1, lambda: None).traces
    return trace


def _drafts(params: Profile) -> int:
    """The most that the benchmark drafts in a step."""
    return max(params.benchmark.num_speculative_tokens)
