"""A real illegal memory access, bisected without a hint: plant it, crash a healthy fleet, let rltop find it.

    # real SGLang, on a host with a GPU; the bug is in examples/planted_ima
    python examples/bisect_planted_ima.py --bug padding --out out-padding --engine-pythonpath SGLANG
    python examples/bisect_planted_ima.py --bug verify --out out-verify --engine-pythonpath SGLANG
    # what CUDA_LAUNCH_BLOCKING tells, graphs off: no bisection, one engine and the frame of the launch
    python examples/bisect_planted_ima.py --bug anywhere --frame --engines 1 --out out-frame --engine-pythonpath SGLANG
    # a dry run of the same script with rltop's CPU engine, a stand-in that only says that it had an access
    python examples/bisect_planted_ima.py --bug verify --out out-dry --kind cpu

Steps, each with the minutes since the start: model, fleet up (`rltop up`), traffic on every engine until one of them
crashes, `rltop bisect start --exclusive`, export, a picture of the Bisect screen, `rltop down`. rltop is told nothing
about the bug. `OUT` then has report.md, report.json, screen.svg, record.json, engine logs of the crash, and
result.json: what was planted, what was named, the kernel, minutes per trial and in all, flags before and after.

Exit codes: 0 the right culprit and kernel, engines on their own flags; 1 anything else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CULPRITS: dict[str, set[str]] = {
    "padding": {"cuda_graph_padding"}, "verify": {"cuda_graph", "speculative"}, "anywhere": set()
}  # fmt: skip
"""Without graphs nothing is padded: rltop says "cuda_graph_padding, alone or with cuda_graph"."""
ALSO_RIGHT: dict[str, tuple[set[str], ...]] = {
    "padding": ({"cuda_graph", "cuda_graph_padding"},), "verify": (), "anywhere": ()
}  # fmt: skip
KERNEL = {"sglang": "planted_oob_kernel", "cpu": "planted_oob_kernel"}
SGLANG_ARGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--dtype", "bfloat16", "--max-total-tokens", "200000", "--max-running-requests", "48", "--random-seed", "1"),
    *("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"),
)
CONCURRENCY = 21
"""Above 8 and odd: SGLang captures graphs for 1 to 8, then for some sizes only, and pads to them."""
UP_S, CRASH_S = 300.0, 300.0
BUDGET_MIN = {"sglang": 60.0, "cpu": 600.0}
"""With a time scale the seconds of a restart are minutes as well, and a busy machine needs many of them."""


def main() -> int:
    options = _options()
    scene = Scene(options)
    try:
        return scene.play()
    finally:
        scene.close()


class Scene:
    """One planted bug, from the model to the report."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out.resolve()
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = self.out / "work"
        self.began = time.monotonic()
        self.run = f"planted-{options.bug}"
        self.env = {**os.environ, "RLTOP_DIR": str(self.work)}
        self.result: dict[str, Any] = {"planted": options.bug, "engines": options.engines, "kind": options.kind}

    def play(self) -> int:
        """All of it."""
        self._up()
        if self.options.frame:
            return self._frame()
        before = self._flags()
        crashed = asyncio.run(self._until_a_crash())
        self._told(f"engine {crashed} crashed")
        self._healthy()
        extra = ["--time-scale", str(self.options.time_scale)] if self.options.kind == "cpu" else []
        budget = ["--budget-min", str(self.options.budget_min)]
        extra += ["--toggles", self.options.toggles] if self.options.toggles else []
        self._rltop(
            "bisect", "start", "--run", self.run, "--exclusive", "--yes", "--follow", *budget, *extra, ok=(0, 1)
        )
        self._told("the bisection is over")
        self._healthy()
        self.result["flags_restored"] = self._flags() == before
        self._report()
        return self._judged()

    def close(self) -> None:
        """The run down, whatever happened."""
        self._rltop("down", self.run, ok=(0, 1, 2))
        self._told("down")
        for log in self.work.glob(f"runs/{self.run}/engines/*/*/stdout.log"):
            target = self.out / "logs" / "-".join(log.parts[-3:])
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(log, target)

    # ------------------------------------------------------------------ steps

    def _up(self) -> None:
        from rltop.train.tiny_model import TinyModelConfig, make_tiny_model

        shape = TinyModelConfig(
            hidden_size=256, intermediate_size=768, num_layers=4, num_heads=4, head_dim=64, max_positions=2048,
            vocab_rows=512,
        ) if self.options.kind == "sglang" else TinyModelConfig()  # fmt: skip
        model = make_tiny_model(self.work / "model", shape)
        config = json.loads((model / "config.json").read_text())
        if self.options.kind == "sglang":
            config["architectures"] = ["PlantedQwen3ForCausalLM"]
            (model / "config.json").write_text(json.dumps(config, indent=2))
        file = self.work / "fleet.toml"
        file.write_text(self._config(model))
        self._rltop("up", str(file))
        self._healthy()
        self._told(f"{self.options.engines} engines are healthy")

    def _config(self, model: Path) -> str:
        """The file of `rltop up`."""
        share = round(0.9 - 0.02 * self.options.engines, 2)
        if self.options.kind == "sglang":
            path = os.pathsep.join(filter(None, (self.options.engine_pythonpath, str(HERE))))
            args = [*SGLANG_ARGS, "--mem-fraction-static", str(share)]
            env = {
                "PYTHONPATH": path,
                "SGLANG_EXTERNAL_MODEL_PACKAGE": "planted_ima",
                "RLTOP_PLANTED_IMA": f"{self.options.bug}:{self.options.one_in}",
            }
        else:
            needs = {"padding": "cuda_graph&cuda_graph_padding:", "verify": "cuda_graph&speculative:"}
            args = ["--speculative-algorithm", "NGRAM"]
            fault = f"ima:{needs.get(self.options.bug, '')}hazard=0.01,kernel={KERNEL['cpu']}"
            env = {"RLTOP_CPU_ENGINE_FAULTS": fault}
        lines = [
            "[run]",
            f'name = "{self.run}"',
            "[engines]",
            f'kind = "{self.options.kind}"',
            f'model_path = "{model}"',
            f"count = {self.options.engines}",
            f"args = {json.dumps(args)}",
            f"env = {{ {', '.join(f'{key} = {json.dumps(value)}' for key, value in env.items())} }}",
            "keep_serving = 0",
            "drain_s = 2",
        ]
        if self.options.kind == "sglang":
            lines.append(f'python = "{self.options.engine_python}"')
        return "\n".join(lines) + "\n"

    def _frame(self) -> int:
        """Launches that block: asked for with graphs on (a dry run that warns), then with graphs off, and a crash."""
        engine = next(iter(self._engines()))
        asked = self._rltop("engine", "set", "launch_blocking=on", "--engine", engine, "--run", self.run, "--dry-run")
        alone = ["launch_blocking=on", "cuda_graph=off", "prefill_graph=off", "core_dump=off"]
        self._rltop("engine", "set", *alone, "--engine", engine, "--run", self.run)
        self._healthy()
        self._told("launches block, graphs and core dumps are off")
        asyncio.run(self._until_a_crash())
        self._healthy()
        causes = [str(one["cause"]) for one in self._engines()[engine].get("crashes") or ()]
        self.result |= {
            "with_graphs_on": asked.strip().splitlines(),
            "causes": causes,
            "right": bool(causes) and "launched at" in causes[0] and "model.py" in causes[0],
            "seconds_in_all": round(time.monotonic() - self.began, 1),
        }
        (self.out / "result.json").write_text(json.dumps(self.result, indent=1) + "\n")
        print(json.dumps(self.result))
        return 0 if self.result["right"] else 1

    async def _until_a_crash(self) -> str:
        """Load on every engine, greedy and of odd sizes, until one is not the generation that it was."""
        from rltop.engines.client import AsyncEngineClient
        from rltop.engines.traffic import Traffic

        engines = self._engines()
        born = {name: cell["generation"] for name, cell in engines.items()}
        stop = asyncio.Event()
        # Greedy: the first sampled request under NGRAM stands still for a minute and more while a kernel is compiled.
        asked = [
            {**body, "sampling_params": {"max_new_tokens": 16 + 7 * at % 120, "temperature": 0.0, "ignore_eos": True}}
            for at, body in enumerate(Traffic.synthetic(requests=96).requests)
        ]
        traffic = Traffic(source="planted", requests=tuple(asked), concurrency=CONCURRENCY)

        async def load(url: str, seed: int) -> None:
            async with AsyncEngineClient(url) as engine:
                await traffic.replay(seed).run(engine, stop=stop)

        tasks = [asyncio.create_task(load(str(cell["url"]), at)) for at, cell in enumerate(engines.values())]
        try:
            async with asyncio.timeout(CRASH_S):
                while True:
                    now = await asyncio.to_thread(self._engines)
                    for name, cell in now.items():
                        if cell["generation"] != born[name] or cell.get("crashes"):
                            return name
                    await asyncio.sleep(0.5)
        finally:
            stop.set()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _healthy(self) -> None:
        """Until every engine is."""
        ends = time.monotonic() + UP_S
        while True:
            states = {name: str(cell.get("state")) for name, cell in self._engines().items()}
            if len(states) == self.options.engines and set(states.values()) == {"HEALTHY"}:
                return
            if time.monotonic() > ends:
                raise SystemExit(f"after {UP_S:.0f} s the engines are {states}")
            time.sleep(0.5)

    def _report(self) -> None:
        for kind, name in (("md", "report.md"), ("json", "report.json")):
            self._rltop("bisect", "export", "--run", self.run, "--to", kind, "-o", str(self.out / name), ok=(0, 1))
        asyncio.run(self._picture())
        for record in self.work.glob(f"runs/{self.run}/bisect/*/record.json"):
            shutil.copyfile(record, self.out / "record.json")

    async def _picture(self) -> None:
        """The Bisect screen as it stands."""
        from rltop.client import local_client
        from rltop.runs import list_runs
        from rltop.tui.app import RltopApp

        os.environ["RLTOP_DIR"] = str(self.work)
        run = next(found for found in list_runs() if found.name == self.run)
        client = local_client(run, role="view")
        app = RltopApp(client)
        async with app.run_test(size=(120, 40)) as pilot:
            for _ in range(100):
                await pilot.pause(0.1)
                if client.mirror.state.get("bisect"):
                    break
            await pilot.press("B")
            await pilot.pause(1.0)
            (self.out / "screen.svg").write_text(app.export_screenshot(title="rltop"))

    def _judged(self) -> int:
        report = json.loads((self.out / "report.json").read_text())
        culprit = set(report.get("culprit") or ())
        wanted = (CULPRITS[self.options.bug], *ALSO_RIGHT[self.options.bug])
        kernel = str((report.get("kernel") or {}).get("name") or "")
        right = culprit in wanted
        named = KERNEL[self.options.kind] in kernel
        self.result |= {
            "named": sorted(culprit),
            "state": report.get("state"),
            "right": right,
            "kernel": kernel,
            "kernel_right": named,
            "bisection_minutes": report.get("minutes"),
            "trials": [
                {key: trial.get(key) for key in ("n", "on", "off", "outcome", "minutes", "fingerprint", "note")}
                for trial in report.get("trials") or ()
            ],
            "seconds_in_all": round(time.monotonic() - self.began, 1),
        }
        (self.out / "result.json").write_text(json.dumps(self.result, indent=1) + "\n")
        print(json.dumps({key: value for key, value in self.result.items() if key != "trials"}))
        for trial in self.result["trials"]:
            print(json.dumps(trial))
        wrong = wrongs(report, right=right, kernel=named, flags=self.result["flags_restored"])
        for one in wrong:
            self._told(f"WRONG: {one}")
        return 1 if wrong else 0

    # ------------------------------------------------------------------ rltop

    def _engines(self) -> Mapping[str, Mapping[str, Any]]:
        text = self._rltop("get", "engines", "--run", self.run, "--json", quiet=True)
        engines: Mapping[str, Mapping[str, Any]] = json.loads(text)["engines"]
        return engines

    def _flags(self) -> dict[str, Any]:
        """Arguments and variables of every engine, as rltop wants them."""
        kept = ("args", "argv", "env", "toggles")
        return {name: {key: cell.get(key) for key in kept} for name, cell in self._engines().items()}

    def _rltop(self, *words: str, ok: Sequence[int] = (0,), quiet: bool = False) -> str:
        command = [sys.executable, "-m", "rltop", *words]
        done = subprocess.run(command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE if quiet else None,
                              text=True, check=False)  # fmt: skip
        if not quiet:
            print(done.stdout, end="", flush=True)
        if done.returncode not in ok:
            raise SystemExit(f"rltop {' '.join(words)}: exit code {done.returncode}\n{done.stderr or ''}")
        return done.stdout

    def _told(self, what: str) -> None:
        print(f"[{time.monotonic() - self.began:7.1f} s] {what}", flush=True)


def wrongs(report: Mapping[str, Any], *, right: bool, kernel: bool, flags: bool) -> list[str]:
    """What is not as it was planted, a sentence each. report: `rltop bisect export --to json`."""
    found = []
    if not right:
        named = " x ".join(report.get("culprit") or ()) or "nothing"
        why = f"it ended {report.get('state')} after {report.get('minutes') or 0:.0f} min: {report.get('text')}"
        budget = "; --budget-min gives it longer" if report.get("state") == "budget" else ""
        found.append(f"{named} was named ({why}{budget})")
    if not kernel:
        found.append(f"the kernel is {(report.get('kernel') or {}).get('name') or 'not known'}")
    if not flags:
        found.append("an engine is not on its own flags")
    return found


def _options(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bug", choices=sorted(CULPRITS), required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--kind", choices=("sglang", "cpu"), default="sglang")
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--one-in", type=int, default=4000, help="replays per access, on average")
    parser.add_argument("--frame", action="store_true", help="no bisection: what CUDA_LAUNCH_BLOCKING tells")
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--engine-pythonpath", default="", help="where SGLang is, if the interpreter does not know")
    parser.add_argument("--toggles", default="", help="only these, where the host can not run others (a JIT, say)")
    parser.add_argument(
        "--budget-min", type=float, help="default: 60; of a dry run 600, for its restarts count as minutes too"
    )
    parser.add_argument("--time-scale", type=float, default=60.0, help="dry run only: minutes per minute of clock")
    options = parser.parse_args(words)
    if options.budget_min is None:
        options.budget_min = BUDGET_MIN[options.kind]
    return options


if __name__ == "__main__":
    sys.exit(main())
