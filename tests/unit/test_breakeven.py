"""`eyas profile`: its arithmetic and sentences, kernel names by class, traces, and what it refuses before an engine starts."""

import gzip
import json
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from typer.testing import CliRunner

from eyas.benchmark.breakeven import BreakEven, StepTime, measured_words, step_time, unsteady_words, words
from eyas.benchmark.profile import break_even, check_room, engines, rows_of
from eyas.benchmark.profile_command import numbers, sentences
from eyas.benchmark.profile_plot import draw
from eyas.benchmark.timing import DraftedTokens, repeated_prompt
from eyas.benchmark.trace import (
    ATTENTION,
    COMMUNICATION,
    HOST,
    MATMUL,
    OTHER,
    SAMPLING,
    busy_seconds,
    classify,
    kernel_times,
    operator_times,
    read_trace,
)
from eyas.cli import app
from eyas.errors import EyasError
from eyas.params import load_profile


def steady(seconds: float) -> StepTime:
    return StepTime(seconds, seconds, seconds, 24)


def row(
    plain: float = 0.1, verify: float | None = 0.12, step: float = 0.15, k: int = 3, batch_size: int = 8
) -> BreakEven:
    told = None if verify is None else steady(verify)
    return BreakEven(batch_size, k, steady(plain), told, steady(step), 1.0)


def test_needed_length_is_the_ratio_of_step_times() -> None:
    assert row().needed() == pytest.approx(1.5)
    assert row().needed(1.2) == pytest.approx(1.8)
    assert row().draft_seconds == pytest.approx(0.03)
    assert row(verify=0.16).draft_seconds == 0.0  # a difference of noise is no negative cost
    assert row(verify=None).draft_seconds is None


def test_words_say_what_pays_and_what_cannot() -> None:
    assert words(row()) == "batch 8, k 3: pays above 1.50 tokens a step; 2.67x if every draft were accepted"
    assert words(row(step=0.5)).endswith("cannot pay: needs 5.00 tokens a step, k + 1 = 4 is the most there is")
    assert not row(step=0.5).reachable()
    assert row(step=0.4).reachable()
    assert not row(step=0.4).reachable(1.2)


def test_measured_head_is_set_against_its_own_row_only() -> None:
    metrics = {"eagle3": {"acceptance_length": 1.58, "speedup": 0.79}}
    said = measured_words(row(step=0.2), metrics)
    assert said is not None
    assert "1.58 tokens a step, so 0.79x expected here" in said
    assert said.endswith("measured 0.79x")
    assert measured_words(row(), {"plain": {"speedup": 1.0}}) is None
    rows = [row(batch_size=1), row(batch_size=8)]
    assert len(sentences(rows, metrics, (8, 3))) == 3
    assert len(sentences(rows, metrics, (8, 5))) == 2
    assert len(sentences(rows, {}, (8, 3))) == 2


def test_unsteady_steps_are_said() -> None:
    assert unsteady_words([row()]) is None
    shaky = BreakEven(1, 3, StepTime(0.1, 0.09, 0.14, 24), None, steady(0.2), 1.0)
    said = unsteady_words([row(), shaky])
    assert said is not None
    assert "50% of the median" in said
    assert sentences([shaky], {}, (1, 3))[-1] == said


def test_step_time_counts_only_steps_that_drafted_all() -> None:
    whole = [True] * 5 + [False] * 5
    time = step_time({"seconds": [0.1, 0.2, 0.3, 0.4, 0.5] + [9.0] * 5, "drafted_all": whole})
    assert time == StepTime(pytest.approx(0.3), pytest.approx(0.2), pytest.approx(0.4), 5)
    assert step_time({"seconds": [0.1] * 4 + [9.0] * 5, "drafted_all": [True] * 4 + [False] * 5}) is None


def batch(seconds: float, tokens: int, whole: bool = True) -> dict[str, object]:
    return {"seconds": [seconds] * 6, "tokens": [tokens] * 6, "drafted_all": [whole] * 6}


def test_rows_come_from_the_processes_answers_and_back_from_a_file() -> None:
    measured = {
        "plain": {"batches": {"2": batch(0.1, 2)}},
        "ngram-k3": {"batches": {"2": batch(0.12, 5, whole=False)}},
        "eagle3-k3": {"batches": {"2": batch(0.2, 3)}},
    }
    rows = break_even(measured, [2], [3])
    assert (rows[0].verify, rows[0].needed(), rows[0].acceptance_length) == (None, pytest.approx(2.0), 1.5)
    assert rows_of(json.loads(json.dumps({"rows": [asdict(r) for r in rows]}))) == rows
    measured["eagle3-k3"] = {"batches": {"2": batch(0.2, 3, whole=False)}}
    with pytest.raises(EyasError, match=r"eagle3-k3: too few steps at batch size 2"):
        break_even(measured, [2], [3])


def test_engines_are_plain_then_each_drafter_with_each_k(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made = engines(load_profile("smoke"), tmp_path, [3, 5])
    assert [m.label for m in made] == ["plain", "ngram-k3", "ngram-k5", "eagle3-k3", "eagle3-k5"]
    assert made[-1].speculative == {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 5}


def test_a_context_without_room_for_the_steps_is_refused() -> None:
    check_room(864, [1, 8], [3], 1024)
    with pytest.raises(EyasError, match=r"--context-length 865 does not fit.*at most 864"):
        check_room(865, [1, 8], [3], 1024)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "-1", "two"])
def test_lists_of_numbers(text: str) -> None:
    assert numbers("8, 1,8", "--batch-sizes") == [1, 8]
    with pytest.raises(EyasError, match="positive numbers"):
        numbers(text, "--batch-sizes")


def test_the_command_refuses_before_anything_starts(tmp_path: Path) -> None:
    out = tmp_path / "profile.json"
    for options, said in (
        (["--context-length", "2000"], "--context-length 2000 does not fit"),
        (["--k", "0"], "--k 0: give positive numbers"),
    ):
        result = CliRunner().invoke(app, ["profile", "--profile", "smoke", "--out", str(out), *options])
        assert result.exit_code == 1
        assert said in " ".join(result.output.split())
    assert not out.exists()


def test_drafted_tokens_are_those_of_the_last_step_alone() -> None:
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    def stats(*drafts: int) -> SchedulerStats:
        made = SpecDecodingStats.new(3)
        for tokens in drafts:
            made.observe_draft(tokens, 0)
        return SchedulerStats(spec_decoding_stats=made if drafts else None)

    steps, recorded = iter([stats(3, 3), stats(), None, stats(2)]), []
    manager = SimpleNamespace(record=lambda **given: recorded.append(given["scheduler_stats"]))

    def step() -> list[Any]:
        given = next(steps)
        if given is not None:
            manager.record(scheduler_stats=given, iteration_stats=None)
        return []

    core: Any = SimpleNamespace(logger_manager=manager, step=step)
    drafted = DraftedTokens(core)
    counts = []
    for _ in range(4):
        drafted.step(core)
        counts.append(drafted.last)
    assert counts == [6, 0, 0, 2]
    assert len(recorded) == 3  # vLLM's own statistics go on
    with pytest.raises(EyasError, match="keeps no statistics"):
        DraftedTokens(SimpleNamespace(logger_manager=None))  # type: ignore[arg-type]


def test_prompts_repeat_and_differ() -> None:
    prompt = repeated_prompt(1000, 100, 1)
    assert len(prompt) == 100
    assert prompt[:52] == prompt[48:]
    assert prompt != repeated_prompt(1000, 100, 2)
    assert len(repeated_prompt(1000, 2, 1)) == 2


# names as NCCL, vLLM, FlashAttention, FlashMLA, FlashInfer, Marlin, CUTLASS, cuBLAS and torch's compiler give them
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION),
        ("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)", COMMUNICATION),
        ("two_shot_all_reduce_kernel_inplace", COMMUNICATION),
        ("multimem_all_reduce_kernel", COMMUNICATION),
        ("flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport", COMMUNICATION),
        ("void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128>>", ATTENTION),
        (
            "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>>",
            ATTENTION,
        ),
        ("void flash_fwd_splitkv_mla_kernel<Flash_fwd_kernel_traits_mla<576>>", ATTENTION),
        ("fmhaSm100fKernel_QkvBfloat16OBfloat16H128PagedKvCausal", ATTENTION),
        ("kernel_unified_attention_2d", ATTENTION),
        ("merge_attn_states_kernel", ATTENTION),
        ("void cutlass::fmha::kernel::Sm100FmhaMlaKernelTmaWarpspecialized", ATTENTION),
        ("void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8, false, 4, 2, false>", MATMUL),
        ("void marlin_moe_wna16::Marlin<__nv_bfloat16, 1125899906909960l, 256>", MATMUL),
        ("fused_moe_kernel", MATMUL),
        ("void vllm::moe::moe_align_block_size_kernel<int>", MATMUL),
        ("void vllm::moe::topkGatingSoftmax<8, 384, 4, 16>", MATMUL),
        ("void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>", MATMUL),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", MATMUL),
        ("ampere_bf16_s16816gemm_bf16_64x64_ldg8_f2f_stages_64x5_tn", MATMUL),
        ("_topk_topp_kernel", SAMPLING),
        ("rejection_greedy_sample_kernel", SAMPLING),
        ("void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024>", SAMPLING),
        ("_gumbel_sample_kernel", SAMPLING),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>", SAMPLING),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16>", OTHER),
        ("void vllm::concat_and_cache_mla_kernel<__nv_bfloat16>", OTHER),
        ("void vllm::rotary_embedding_kernel<c10::BFloat16, true>", OTHER),
        ("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>", OTHER),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel>", OTHER),
        ("triton_red_fused_add_mean_mul_pow_rsqrt_0", OTHER),
        ("Memcpy HtoD (Pageable -> Device)", OTHER),
        ("_C::onednn_mm", MATMUL),
        ("_C::cpu_attention_with_kv_cache", ATTENTION),
        ("_C::cpu_attn_reshape_and_cache", OTHER),
        ("_C::greedy_argmax", SAMPLING),
    ],
)
def test_kernel_names(name: str, kind: str) -> None:
    assert classify(name) == kind


def test_busy_time_is_the_union() -> None:
    assert busy_seconds([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert busy_seconds([]) == 0


def test_kernels_are_counted_and_the_host_is_what_is_left(tmp_path: Path) -> None:
    events = [
        {
            "ph": "X",
            "cat": "kernel",
            "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
            "ts": 0,
            "dur": 300,
            "pid": 0,
            "tid": 7,
        },
        {"ph": "X", "cat": "kernel", "name": "fused_moe_kernel", "ts": 300, "dur": 500, "pid": 0, "tid": 7},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 900, "pid": 1, "tid": 1},
    ]
    file = tmp_path / "rank0.1.pt.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    read = read_trace(file, 0.001)
    assert read["device"] == "gpu"
    seconds = {kind: value for kind, value in read["seconds"].items() if value}
    assert seconds == {COMMUNICATION: pytest.approx(3e-4), MATMUL: pytest.approx(5e-4), HOST: pytest.approx(2e-4)}
    assert kernel_times(events[:2])[MATMUL] == 500
    assert list(read["kernels"]) == ["fused_moe_kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]


def test_operators_count_by_self_time_and_nameless_ones_with_their_caller() -> None:
    def call(name: str, ts: float, dur: float) -> dict[str, object]:
        return {"name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1}

    times = operator_times(
        [
            call("vllm::unified_attention_with_output", 0, 100),
            call("aten::empty", 10, 20),
            call("aten::mm", 40, 30),
            call("aten::argmax", 100, 5),
        ]
    )
    assert {kind: value for kind, value in times.items() if value} == {ATTENTION: 70, MATMUL: 30, SAMPLING: 5}


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_a_real_trace_of_the_profiler(tmp_path: Path, suffix: str) -> None:
    left_NN, x_N = torch.randn(256, 256), torch.randn(50_000)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as recorded:
        for _ in range(5):
            left_NN = left_NN @ left_NN
            torch.nn.functional.scaled_dot_product_attention(*[left_NN.view(1, 4, 64, 256)] * 3)
            x_N.argmax()
            torch.nn.functional.rms_norm(x_N, (50_000,))
    file = tmp_path / f"trace{suffix}"
    recorded.export_chrome_trace(str(file))
    read = read_trace(file, 10.0)
    assert read["device"] == "cpu"
    assert all(read["seconds"][kind] > 0 for kind in (MATMUL, ATTENTION, SAMPLING, OTHER))
    assert read["seconds"][COMMUNICATION] == 0
    assert sum(read["seconds"].values()) == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "not a torch profiler trace"),
        (b"{}", "not a torch profiler trace"),
        (b'{"traceEvents": []}', "no kernel"),
    ],
)
def test_files_that_are_no_traces(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "trace.json"
    file.write_bytes(content)
    with pytest.raises(EyasError, match=said):
        read_trace(file, 1.0)
    with pytest.raises(EyasError, match="not a torch profiler trace"):
        read_trace(tmp_path / "missing.json.gz", 1.0)


def test_plot_is_a_png(tmp_path: Path) -> None:
    file = tmp_path / "profile.png"
    draw([row(batch_size=1), row(batch_size=8, verify=None), row(k=5), row(k=5, batch_size=1)], file)
    assert file.read_bytes().startswith(b"\x89PNG")
