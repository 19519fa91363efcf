"""Measure how often a 95% interval holds the true value, on made-up data sets with a known truth.

python bench/intervals.py --json bench/results/intervals.json

It makes 1,000 data sets of each shape and size, which takes a while. The true ratio of each shape
is computed from four million examples. `held` is the share of intervals that contain the truth,
`too_high` and `too_low` are the shares above and below it, and `width` is the median width. With
1,000 data sets, the standard error of a share of 95% is 0.7 points.

It also measures how often the verdict claims a difference where there is none, how often it says
"better" where a model is better, and what a comparison of many examples costs."""

import argparse
import json
import resource
import time
from functools import cache
from pathlib import Path

import numpy as np

from multigpu_ft.evaluation.comparison import BETTER, NO_DIFFERENCE, Comparison, Scores
from multigpu_ft.evaluation.statistics import ratio_estimates, share_difference, share_estimate

SHAPES = {}
DRAWS = 2000  # bootstrap draws; an evaluation makes 10,000


def shape(make):
    "Register `make(rng, n)`, which returns the tokens and the change per token of `n` examples."
    SHAPES[make.__name__] = make
    return make


def lognormal(rng, n, sigma=0.8, longest=1024):
    return np.clip(np.round(rng.lognormal(5, sigma, n)), 2, longest)


@shape
def equal_lengths(rng, n):
    "Texts of one length with normal changes, as in a packed data set."
    return np.full(n, 512.0), rng.normal(-0.1, 0.3, n)


@shape
def noisy_short_texts(rng, n):
    "Texts of uneven lengths; the shorter a text, the noisier its mean."
    tokens = lognormal(rng, n)
    return tokens, -0.1 + rng.normal(0, 1, n) * (0.1 + 2 / np.sqrt(tokens))


@shape
def gain_grows_with_length(rng, n):
    tokens = lognormal(rng, n)
    return tokens, 0.1 - 0.05 * np.log(tokens) + rng.normal(0, 0.2, n)


@shape
def skewed(rng, n):
    "Most texts get a little worse, some much better."
    return lognormal(rng, n), 0.1 - rng.exponential(0.3, n)


@shape
def skewed_and_grows_with_length(rng, n):
    z = rng.normal(0, 1, n)
    return np.clip(np.round(np.exp(5 + 0.8 * z)), 2, 1024), -0.05 * z - 0.1 * rng.lognormal(
        0, 0.8, n
    )


@shape
def cut_texts(rng, n):
    "Most texts reach `max_length`."
    tokens = np.minimum(512, np.round(rng.lognormal(6.5, 0.8, n)))
    return tokens, -0.02 * np.log(tokens) - rng.gamma(1, 0.1, n)


@shape
def outliers(rng, n):
    "Student's t with 3 degrees of freedom."
    return lognormal(rng, n), 0.1 * rng.standard_t(3, n) - 0.02


@shape
def few_change(rng, n):
    "Four out of five texts do not change at all."
    return lognormal(rng, n), np.where(rng.random(n) < 0.2, -rng.exponential(0.5, n), 0)


@shape
def loss_of_a_model(rng, n):
    "A loss instead of a difference: longer texts are easier."
    z = rng.normal(0, 1, n)
    tokens = np.clip(np.round(np.exp(5 + 0.8 * z)), 2, 1024)
    return tokens, 3 - 0.3 * z + rng.gamma(2, 0.3, n) + rng.normal(0, 1, n) / np.sqrt(tokens)


@shape
def very_heavy_tails(rng, n):
    "The limit of the method: lengths and changes are lognormal with σ = 1, lengths up to 4,096."
    return lognormal(rng, n, 1, 4096), 0.05 - 0.1 * rng.lognormal(0, 1, n)


@cache
def true_ratio(make, examples=4_000_000):
    rng, changes, tokens = np.random.default_rng(12345), 0.0, 0.0
    for _ in range(examples // 100_000):
        weights, each = make(rng, 100_000)
        changes, tokens = changes + (weights * each).sum(), tokens + weights.sum()
    return changes / tokens


def coverage(name, n, sets, draws=DRAWS):
    "Return how many intervals hold the truth, for `sets` data sets of `n` examples of a shape."
    make, missed, widths = SHAPES[name], [0, 0], []
    truth = true_ratio(make)
    for number in range(sets):
        rng = np.random.default_rng([number, n, list(SHAPES).index(name)])
        tokens, each = make(rng, n)
        [found] = ratio_estimates((tokens * each)[:, None], tokens, draws, seed=number)
        missed = [missed[0] + (truth < found.low), missed[1] + (truth > found.high)]
        widths.append(found.high - found.low)
    return {
        "shape": name,
        "examples": n,
        "sets": sets,
        "truth": round(float(truth), 4),
        "held": round(1 - int(sum(missed)) / sets, 4),
        "too_high": int(missed[0]) / sets,
        "too_low": int(missed[1]) / sets,
        "width": round(float(np.median(widths)), 4),
    }


def verdicts(name, n, sets, shift):
    "Return the verdicts on a model whose loss changed as in a shape, moved so that the true change is `shift`."
    make, said = SHAPES[name], {}
    truth = true_ratio(make)
    for number in range(sets):
        rng = np.random.default_rng([number, n, 99])
        tokens, each = make(rng, n)
        base = tokens * (4 + rng.normal(0, 0.4, n))
        losses = {"base": base, "new": base + tokens * (each - truth + shift)}
        scored = Scores(
            "made up", 0, n, np.arange(n), tokens.astype(int), tokens.astype(int), losses
        )
        verdict = Comparison(scored, ["base", "new"], "causal-lm").newest.to_base.verdict
        said[verdict] = said.get(verdict, 0) + 1
    return {
        "shape": name,
        "examples": n,
        "sets": sets,
        "true_change": shift,
        **{verdict: count / sets for verdict, count in said.items()},
    }


def share_coverage(lost, gained, n, sets):
    """Return the coverage for the accuracy and for its change, if a share `lost` of texts becomes
    wrong and `gained` becomes right."""
    rng, held, accuracy = np.random.default_rng([n, int(1e4 * lost), int(1e4 * gained)]), 0, 0
    for number in range(sets):
        fewer, more, _ = rng.multinomial(n, [lost, gained, 1 - lost - gained])
        found = share_difference(int(more), int(fewer), n, seed=number)
        held += found.low - 1e-9 <= gained - lost <= found.high + 1e-9
        right = share_estimate(int(rng.binomial(n, 0.8)), n)
        accuracy += right.low <= 0.8 <= right.high
    return {
        "lost": lost,
        "gained": gained,
        "examples": n,
        "sets": sets,
        "held": held / sets,
        "accuracy_of_80_held": accuracy / sets,
    }


def cost(n):
    "Return the seconds and memory of a comparison: loss of two models and their difference, 10,000 draws."
    rng = np.random.default_rng(0)
    tokens = lognormal(rng, n).astype(int)
    base = tokens * rng.normal(4, 0.4, n)
    scored = Scores(
        "made up", 0, n, np.arange(n), tokens, tokens, {"base": base, "new": base - 0.1 * tokens}
    )
    begun = time.perf_counter()
    Comparison(scored, ["base", "new"], "causal-lm")
    seconds = time.perf_counter() - begun
    return {
        "examples": n,
        "seconds": round(seconds, 2),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=1000)
    parser.add_argument("--sizes", type=int, nargs="*", default=[30, 50, 100, 400])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    # the cost comes first, while its own peak of memory is the peak of the process
    results = {
        "cost": [cost(n) for n in (100, 400, 5000, 100_000)],
        "draws_in_simulation": DRAWS,
    }
    print(*results["cost"], sep="\n", flush=True)
    splits = (0.05, 0.05), (0.05, 0.15), (0.01, 0.05), (0, 0.03)
    for kind, found in (
        (
            "accuracy",
            (share_coverage(*split, n, options.sets) for split in splits for n in options.sizes),
        ),
        ("intervals", (coverage(name, n, options.sets) for n in options.sizes for name in SHAPES)),
        (
            "nothing_to_find",
            (
                verdicts(name, 100, options.sets, 0.0)
                for name in ("equal_lengths", "gain_grows_with_length", "skewed")
            ),
        ),
        (
            "something_to_find",
            (verdicts("gain_grows_with_length", n, options.sets, -0.05) for n in (50, 100, 200)),
        ),
    ):
        results[kind] = []
        for row in found:
            results[kind].append(row)
            print(row, flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1) + "\n")
    for kind, row in [(BETTER, r) for r in results["something_to_find"]] + [
        (NO_DIFFERENCE, r) for r in results["nothing_to_find"]
    ]:
        print(
            f"{row['shape']}, {row['examples']} examples, true change {row['true_change']}: "
            f"{row.get(kind, 0):.1%} {kind}"
        )


if __name__ == "__main__":
    main()
