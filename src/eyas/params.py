"""Profile parameters (identity: what changes output bytes) and machine settings (placement: what does not).

Takes ``params.yaml`` and the untracked ``machine.yaml``; gives frozen, validated pydantic models. YAML is read as
YAML 1.2, the way DVC reads it (``1e-4`` is a number, ``yes`` is a string).
"""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from eyas.errors import EyasError

_M = TypeVar("_M", bound=BaseModel)
PARAMS_FILE = Path("params.yaml")
MACHINE_FILE = Path("machine.yaml")
_NOT_METHODS = ("sets", "categories", "grid", "interleaved", "repeats")  # other keys of the benchmark's metrics


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetParams(_Section):
    """The model whose decoding is to become faster."""

    source: str = Field(description="`bundled:smollm2-135m`, a local directory, or a Hugging Face hub id")
    revision: str | None = Field(None, description="commit of a hub id")
    dtype: Literal["float32", "bfloat16", "float16", "auto"] = Field("auto", description="compute type in the engine")
    max_model_len: int = Field(gt=0, description="longest context in tokens")
    trust_remote_code: bool = False
    chat_template_kwargs: dict[str, bool | int | str] = Field(
        default_factory=dict, description="variables of the chat template, such as `enable_thinking: false`"
    )


class SourceParams(_Section):
    """One place that conversations come from."""

    source: str = Field(
        description="`package:<name>` of the bundled catalogue, `hub:<owner>/<name>` of the Hugging Face hub, or a file, folder or glob under data/input"
    )
    subset: str | None = Field(None, description="configuration of a hub data set")
    split: str = Field("train", description="split of a hub data set")
    revision: str | None = Field(None, description="commit of a hub data set")
    cap: int | None = Field(None, gt=0, description="keep at most so many conversations")
    weight: float = Field(
        1.0,
        gt=0,
        description="how often a row of this source is taken, against the others', when dataset.cap has to choose",
    )


class DatasetParams(_Section):
    """Conversations, their split, and the prompt sets for benchmarking."""

    sources: list[SourceParams] = Field(min_length=1)
    cap: int | None = Field(None, gt=0, description="keep at most so many conversations, sampled from all sources")
    near_duplicate: float = Field(
        0.8,
        gt=0,
        le=1,
        description="Jaccard similarity from which a conversation counts as another's copy; 1: equal ones only",
    )
    max_turns: int = Field(2, gt=0, description="keep at most so many user turns of a conversation")
    max_prompt_chars: int = Field(600, gt=0, description="set aside conversations with a longer user turn")
    validation_share: float = Field(0.1, gt=0, lt=1)
    max_rejected_share: float = Field(0.5, ge=0, le=1, description="more rejected rows than this is an error")
    benchmark_sets: list[SourceParams] = Field(default_factory=list, description="prompt sets that training never sees")


class ResponseParams(_Section):
    """How the target answers."""

    mode: Literal["regenerate", "keep"] = Field(
        "regenerate", description="`keep`: train on the answers that the data holds (greedy probes are answered anyway)"
    )
    temperature: float = Field(0.7, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(gt=0, description="longest answer in tokens")
    seed: int = 0
    drop_looped: bool = Field(
        True, description="end a conversation before an answer whose tail repeats a few tokens; they flatter acceptance"
    )
    greedy_probes: int = Field(
        8, ge=1, description="validation prompts answered greedily for the extraction self-check"
    )


class ExtractParams(_Section):
    """Which hidden states are recorded and how they are kept."""

    layers: list[int] = Field(min_length=2, description="vLLM layer ids; the last is the final layer, before the norm")
    codec: Literal["none", "lossless", "fp8"] = "lossless"
    shard_mib: int = Field(2048, gt=0, description="shards are closed at about this size (uncompressed)")

    @model_validator(mode="after")
    def _ascending(self) -> ExtractParams:
        if self.layers != sorted(set(self.layers)):
            raise ValueError(f"layers must be distinct and ascending, got {self.layers}")
        return self


class VocabParams(_Section):
    """The draft vocabulary."""

    draft_vocab_size: int | None = Field(gt=0, description="null: the target's whole vocabulary")


# Numbers of each kind of rotary embedding that transformers (training) and vLLM (serving) compute alike: needed, possible.
# Kinds that change with the length of the text (dynamic, longrope) are not: the two take their factors by other rules.
ROPE_NUMBERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate"),
    ),
}


class RopeParams(_Section):
    """Rotary parameters of the draft head, by the names that transformers and vLLM have for them."""

    rope_type: Literal["default", "linear", "llama3", "yarn"] = Field(description="the kind of rotary embedding")
    rope_theta: float = Field(gt=0, description="base of the wavelengths")
    factor: float | None = Field(None, ge=1, description="how many times longer the context became")
    original_max_position_embeddings: int | None = Field(None, gt=0, description="context before that, in tokens")
    low_freq_factor: float | None = Field(None, gt=0, description="llama3: where wavelengths are scaled wholly")
    high_freq_factor: float | None = Field(None, gt=0, description="llama3: where they are not scaled")
    beta_fast: float | None = Field(None, gt=0, description="yarn: turns from which a wavelength is not scaled")
    beta_slow: float | None = Field(None, gt=0, description="yarn: turns below which it is scaled wholly")
    mscale: float | None = Field(None, ge=0, description="yarn: scale of cosine and sine, numerator")
    mscale_all_dim: float | None = Field(None, ge=0, description="yarn: the same, denominator")
    attention_factor: float | None = Field(None, gt=0, description="yarn: that scale itself, instead of the two")
    truncate: bool | None = Field(None, description="yarn: round the bounds of the ramp to whole dimensions")

    @model_validator(mode="after")
    def _of_its_kind(self) -> RopeParams:
        needed, possible = ROPE_NUMBERS[self.rope_type]
        given = {name for name, value in self if value is not None} - {"rope_type", "rope_theta"}
        if missing := [name for name in needed if name not in given]:
            raise ValueError(f"{self.rope_type} needs {', '.join(missing)}")
        if strange := sorted(given - {*needed, *possible}):
            raise ValueError(f"{self.rope_type} has no {', '.join(strange)}")
        return self


class DraftParams(_Section):
    """The shape of the draft head (speculators' Eagle3SpeculatorConfig)."""

    num_layers: int = Field(1, ge=1, le=2)
    intermediate_size: int | None = Field(None, description="default: the target's")
    norm_before_residual: bool = True
    norm_before_fc: bool = True
    fc_norm: bool = Field(False, description="a norm for each auxiliary layer; excludes norm_before_fc")
    norm_output: bool = True
    sliding_window: int | None = Field(None, gt=0, description="positions that attention sees; null: all before")
    train_embeddings: bool = Field(False, description="train a copy of the target's embeddings with the head")
    rope: RopeParams | None = Field(None, description="rotary parameters; null: the target's")
    init_from: str | None = Field(
        None, description="drafter to start from: a local directory or a hub id, with safetensors; null: start afresh"
    )
    init_revision: str | None = Field(
        None, description="which content that is: commit of a hub id (40 hex digits), hash of a directory's weights"
    )

    @model_validator(mode="after")
    def _one_norm(self) -> DraftParams:
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("fc_norm and norm_before_fc exclude each other; set one of them to false")
        return self

    @model_validator(mode="after")
    def _one_drafter(self) -> DraftParams:
        if self.init_revision is not None and self.init_from is None:
            raise ValueError("init_revision says the content of init_from, which is not set")
        return self


class TrainParams(_Section):
    """Optimisation of the draft head."""

    epochs: int = Field(gt=0)
    lr: float = Field(gt=0)
    warmup_share: float = Field(0.05, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0)
    clip_norm: float = Field(1.0, gt=0)
    optimizer: Literal["adamw", "muon"] = Field(
        "adamw", description="`muon`: Muon for the head's matrices, AdamW for the rest; `lr` serves both"
    )
    schedule: Literal["cosine", "wsd", "linear"] = Field(
        "cosine", description="course of the rate behind the warm-up; `wsd` holds it, then lets it fall linearly"
    )
    decay_share: float = Field(0.2, gt=0, le=1, description="share of the steps in which `wsd` lets the rate fall")
    tokens_per_step: int = Field(gt=0, description="global batch: tokens in one optimiser step, over all ranks")
    tokens_per_pack: int | None = Field(
        None, gt=0, description="tokens that a rank computes at once; default: those of a step"
    )
    on_nan: Literal["stop", "skip"] = Field(
        "stop", description="`skip`: leave a step out whose loss or gradient is not finite, and go on"
    )
    max_skipped: int = Field(3, ge=1, description="steps left out in a row from which training stops all the same")
    patience: int | None = Field(
        None, ge=1, description="stop after so many epochs without a greater held-out acceptance length"
    )
    ttt_steps: int = Field(3, ge=1)
    ttt_decay: float = Field(1.0, gt=0, le=1)
    loss: Literal["kl_div", "rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"] = "kl_div"
    autocast: Literal["float32", "bfloat16", "float8"] = Field(
        "bfloat16",
        description="compute type; master weights stay float32. `float8`: bfloat16, with the feed-forward part's products in float8",
    )
    seed: int = 0

    @property
    def pack_tokens(self) -> int:
        """Tokens of one packed batch."""
        return self.tokens_per_pack or self.tokens_per_step

    @property
    def packs_per_step(self) -> int:
        """Packed batches of one optimiser step, whatever the number of ranks."""
        return -(-self.tokens_per_step // self.pack_tokens)

    @model_validator(mode="after")
    def _pack_fits(self) -> TrainParams:
        if self.pack_tokens > self.tokens_per_step:
            raise ValueError(
                f"tokens_per_pack ({self.tokens_per_pack}) must not exceed tokens_per_step ({self.tokens_per_step})"
            )
        return self


class ReferenceParams(_Section):
    """A published drafter that the trained head is held against."""

    name: str = Field(pattern="^[a-z][a-z0-9-]*$", description="what it is called in metrics")
    source: str = Field(description="a local directory, or a Hugging Face hub id")
    revision: str | None = Field(None, description="commit of a hub id")
    method: Literal["eagle", "eagle3", "draft_model"] = Field("eagle3", description="vLLM's name for its kind")


class BenchmarkParams(_Section):
    """Serving with vLLM: plain, n-gram, other drafters, and the trained head. The main figures: the first of each list."""

    num_speculative_tokens: list[Annotated[int, Field(ge=1)]] = Field(
        default_factory=lambda: [3], min_length=1, description="draft tokens a step (k), each measured"
    )
    concurrency: list[Annotated[int, Field(ge=1)]] = Field(
        min_length=1, description="prompts that are served at a time, each measured"
    )
    repeats: int = Field(3, ge=1, description="times that all is served, by turns; with one, speed has no interval")
    ngram_lookup_min: int = Field(2, ge=1, description="shortest n-gram that is looked up")
    ngram_lookup_max: int = Field(4, ge=1, description="longest n-gram that is looked up")
    suffix: bool = Field(False, description="measure suffix decoding too; it needs the package arctic-inference")
    references: list[ReferenceParams] = Field(
        default_factory=list, description="published drafters to measure on the same prompts"
    )
    max_tokens: int = Field(gt=0, description="longest answer in tokens")
    heldout_prompts: int = Field(ge=1, description="validation prompts that are served")
    prompts_per_set: int = Field(ge=0, description="prompts of each benchmark set that are served")

    @model_validator(mode="after")
    def _distinct(self) -> BenchmarkParams:
        for name in ("num_speculative_tokens", "concurrency"):
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise ValueError(f"{name} must be distinct numbers, got {getattr(self, name)}")
        names = [reference.name for reference in self.references]
        taken = [n for n in names if names.count(n) > 1 or n in ("plain", "ngram", "suffix", "eagle3", *_NOT_METHODS)]
        if taken:
            raise ValueError(f"references: {taken[0]} is the name of something else; choose another")
        if self.ngram_lookup_min > self.ngram_lookup_max:
            raise ValueError("ngram_lookup_min must not be larger than ngram_lookup_max")
        return self


class Profile(_Section):
    """All identity parameters of one profile."""

    target: TargetParams
    dataset: DatasetParams
    responses: ResponseParams
    extract: ExtractParams
    vocab: VocabParams
    draft: DraftParams
    train: TrainParams
    benchmark: BenchmarkParams


class Machine(_Section):
    """Placement: recorded in the provenance, changes nothing downstream."""

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    max_num_seqs: Annotated[int, Field(ge=1)] = 64
    max_num_batched_tokens: Annotated[int, Field(ge=64)] = 4096
    cpu_kv_cache_gib: Annotated[int, Field(ge=1)] = 2
    threads: Annotated[int | None, Field(ge=1, description="CPU threads of a stage; default: all cores")] = None
    store_workers: Annotated[
        int | None,
        Field(
            ge=1,
            description="processes that write or read shards; default: three quarters of the cores, at most 12 (12 for each of `train_ranks`)",
        ),
    ] = None

    benchmark_engines: Annotated[
        int | None,
        Field(
            ge=1,
            description="engines that the benchmark keeps at a time and serves by turns; default: all on a CPU, one on GPUs, which it fills",
        ),
    ] = None

    endpoint: Annotated[
        str | None,
        Field(
            description="base URL of a running vLLM server that answers in place of vLLM in the stage's process, as in http://127.0.0.1:8000/v1"
        ),
    ] = None
    endpoint_concurrency: Annotated[int, Field(ge=1, description="requests at a time")] = 64
    endpoint_timeout_s: Annotated[float, Field(gt=0, description="longest wait for one answer")] = 600.0

    train_ranks: Annotated[
        int | None,
        Field(ge=1, description="processes that train together; default: the visible GPUs, one without a GPU"),
    ] = None
    train_sharding: Annotated[
        Literal["ddp", "fsdp"],
        Field(description="`fsdp`: ranks share weights and moments out, for heads that one GPU cannot hold"),
    ] = "ddp"
    checkpoint_minutes: Annotated[float, Field(gt=0, description="longest time between checkpoints")] = 5.0
    checkpoint_steps: Annotated[
        int | None, Field(ge=1, description="write a checkpoint every so many steps as well")
    ] = None
    checkpoints_kept: Annotated[int, Field(ge=1, description="newest checkpoints that are kept")] = 2
    peak_tflops: Annotated[
        float | None, Field(gt=0, description="bfloat16 peak of a GPU, for the share that is used; known for some")
    ] = None
    track: Annotated[
        list[Literal["dvclive", "tensorboard", "wandb"]],
        Field(
            description="where the series of the training go while it runs; only DVCLive is installed with the project"
        ),
    ] = []

    @property
    def shard_processes(self) -> int:
        """Processes that write shards."""
        return self.readers(1)

    def readers(self, ranks: int) -> int:
        """Processes that read shards, for each of so many ranks."""
        return max(1, (self.store_workers or min(12 * ranks, len(os.sched_getaffinity(0)) * 3 // 4)) // ranks)


def read_yaml(path: Path) -> Any:
    """Parse a YAML 1.2 file.

    Raises:
        EyasError: the file is missing or is not YAML.
    """
    if not path.is_file():
        raise EyasError(f"{path}: no such file; run Eyas from the root of its checkout")
    try:
        return YAML(typ="safe").load(path)
    except YAMLError as error:
        raise EyasError(f"{path}: not valid YAML: {error}") from error


def _nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean `{close[0]}`?" if close else f"; known: {', '.join(sorted(known))}"


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """Names that are allowed at a pydantic error location."""
    current: Any = model
    for part in location:
        if isinstance(part, int):
            continue
        annotation = current.model_fields[part].annotation
        current = next(
            (a for a in getattr(annotation, "__args__", ()) if isinstance(a, type) and issubclass(a, BaseModel)),
            annotation,
        )
    return list(current.model_fields)


def _validated(model: type[_M], value: Any, file: Path, prefix: str) -> _M:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        lines = []
        for item in error.errors():
            name = ".".join([*([prefix] if prefix else []), *map(str, item["loc"])])
            if item["type"] == "extra_forbidden":
                known = _fields_at(model, item["loc"][:-1])
                lines.append(f"{name}: unknown parameter{_nearest(str(item['loc'][-1]), known)}")
            else:
                lines.append(
                    f"{name}: {item['msg']} (got {item['input']!r})"
                    if item["type"] != "missing"
                    else f"{name}: missing"
                )
        raise EyasError(f"{file}: " + f"\n{file}: ".join(lines)) from None


def load_profile(name: str, file: Path = PARAMS_FILE) -> Profile:
    """Read and validate one profile.

    Raises:
        EyasError: unknown profile or parameter (with the nearest right name), a value out of range, a missing file.
    """
    content = read_yaml(file)
    profiles = content.get("profiles") if isinstance(content, dict) else None
    if not isinstance(profiles, dict):
        raise EyasError(f"{file}: needs a mapping `profiles`")
    if name not in profiles:
        raise EyasError(f"{file}: no profile `{name}`{_nearest(name, list(profiles))}")
    return _validated(Profile, profiles[name], file, f"profiles.{name}")


def load_machine(file: Path = MACHINE_FILE) -> Machine:
    """Read ``machine.yaml``, or the defaults where there is none."""
    return _validated(Machine, read_yaml(file) or {}, file, "") if file.exists() else Machine()
