"""Try the mutants of the gate, and compare the survivors with those that are explained."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from conformance.mutants import generated
from tools.gate_mutants.modules import QUICK, TESTS
from tools.gate_mutants.survivors import SURVIVORS
from tools.gate_mutants.trial import reached_lines, survives


def unexplained(module: str, jobs: int) -> tuple[list[str], int]:
    """The survivors of a module that nobody has explained, and the number of its mutants."""
    sites = generated.sites(module)
    runs = reached_lines(module, TESTS[module])
    with ThreadPoolExecutor(jobs) as pool:
        alive = list(pool.map(lambda site: survives(site, runs), sites))
    texts = [site.text for site, each in zip(sites, alive, strict=True) if each]
    known = SURVIVORS.get(module, {})
    return [text for text in texts if text not in known], len(sites)


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 if every mutant is killed or explained."""
    parser = argparse.ArgumentParser(prog="python -m tools.gate_mutants", description=__doc__)
    parser.add_argument("--module", action="append", choices=list(TESTS), help="only this one")
    parser.add_argument("--quick", action="store_true", help="only the modules of some seconds")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args(arguments)
    modules = options.module or (QUICK if options.quick else list(TESTS))
    for name in modules:
        importlib.import_module(name)
    left = 0
    for name in modules:
        survivors, tried = unexplained(name, options.jobs)
        left += len(survivors)
        known = len(SURVIVORS.get(name, {}))
        print(f"{name}: {tried} mutants, {known} explained, {len(survivors)} survive", flush=True)
        for text in survivors:
            print(f"  {text}", flush=True)
    return int(left > 0)


if __name__ == "__main__":
    sys.exit(main())
