"""Calls of latent decode with known results, by the public functions; latent.py checks them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from tilewise import Unsupported, attention, paged_attention
from tilewise.backends import hopper
from tilewise.core.options import Options
from tilewise.testing import case as conformance
from tilewise.testing.cases import LATENT
from tilewise.testing.check import Mismatch, check_case
from tilewise.validation import calls

BF16 = torch.bfloat16
SCALE = 576**-0.5
STAGE = "STAGE "
LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 130, 1000, 4097)
Result = tuple[torch.Tensor, torch.Tensor]  # out [B, H, Lq, 512], lse [B, H, Lq]


def stage(text: str) -> None:
    """What this process does next: if it ends, its parent knows at what."""
    print(STAGE + text, flush=True)


def oracle_of(q: torch.Tensor, keys: torch.Tensor) -> Result:
    """One sequence in float64: `q` [H, Lq, 576], `keys` [n, 576]; the last query sees all keys."""
    q_len, n, k = q.shape[1], len(keys), keys.double()
    s = q.double() @ k.T * SCALE  # [H, Lq, n]
    last = n - q_len + torch.arange(q_len, device=q.device)
    s.masked_fill_(torch.arange(n, device=q.device) > last[:, None], float("-inf"))
    lse = torch.logsumexp(s, -1) if n else torch.full(s.shape[:2], float("-inf"), device=q.device).double()
    p = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return p @ k[:, :512], lse


class Case:
    """Inputs of a call; slots past the lengths, and pages of nobody, hold NaN."""

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        q_len: int,
        page: int = 64,
        paged: bool = True,
        spread: float = 1.0,
        spare: int = 3,
    ) -> None:
        self.lengths, self.heads, self.q_len, self.page, self.paged = lengths, heads, q_len, page, paged
        batch, most = len(lengths), max(*lengths, 1)
        self.q = torch.randn(batch, q_len, heads, 576, device="cuda", dtype=BF16).transpose(1, 2)
        self.q *= spread
        self.n = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        columns = -(-most // page)
        if paged:
            order = torch.randperm(batch * columns + spare, device="cuda", dtype=torch.int32)
            self.table: torch.Tensor | None = order[: batch * columns].view(batch, columns).contiguous()
            self.cache = torch.full((batch * columns + spare, page, 576), float("nan"), device="cuda", dtype=BF16)
        else:
            self.table = None
            self.cache = torch.full((batch, most + 5, 576), float("nan"), device="cuda", dtype=BF16)
        self.keys = []
        for b, n in enumerate(lengths):
            keys = torch.randn(n, 576, device="cuda", dtype=BF16)
            keys[:, :64] += torch.linspace(0, 1, max(n, 1), device="cuda", dtype=BF16)[:n, None]  # maxima that rise
            self.keys.append(keys)
            if self.table is None:
                self.cache[b, :n] = keys
            elif n:
                full = torch.full((-(-n // page) * page, 576), float("nan"), device="cuda", dtype=BF16)
                full[:n] = keys
                self.cache[self.table[b, : -(-n // page)].long()] = full.view(-1, page, 576)
                self.table[b, -(-n // page) :] = -7  # never looked up

    def arguments(self) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        """The function, what it is given, and its options."""
        options: dict[str, Any] = {"causal": True, "scale": SCALE, "return_lse": True}
        if self.table is None:
            keys = self.cache[:, None]  # [B, 1, L, 576]
            return attention, (self.q, keys, keys[..., :512]), options | {"kv_lengths": self.n}
        pages = self.cache[:, :, None]  # [pages, page_size, 1, 576]
        return paged_attention, (self.q, pages, pages[..., :512], self.table, self.n), options

    def call(self) -> Result:
        function, args, options = self.arguments()
        state = function(*args, backend="hopper", **options)
        return state.out, state.lse

    def checked(self) -> calls.Call:
        """The call as a backend sees it."""
        function, args, options = self.arguments()
        return (calls.dense if function is attention else calls.paged)(*args, Options(**options))

    def oracle(self) -> Result:
        found = [oracle_of(q, keys) for q, keys in zip(self.q, self.keys, strict=True)]
        return torch.stack([out for out, _ in found]), torch.stack([lse for _, lse in found])


def judge(name: str, got: Result, want: Result) -> str:
    """What is wrong, if anything is."""
    out, lse = got[0].double(), got[1].double()
    seen = ~want[1].isinf()
    if not torch.equal(lse.isinf(), ~seen) or lse.isnan().any():
        return f"{name}: lse is not finite where it should be, or the other way round"
    off = float((lse - want[1])[seen].abs().max()) if seen.any() else 0.0
    if off > 1e-4:
        return f"{name}: lse off by {off:.2e}"
    if out.isnan().any():
        return f"{name}: {int(out.isnan().any(-1).sum())} rows of {out[..., 0].numel()} have NaN"
    if (out[~seen] != 0).any():
        return f"{name}: rows without keys are not 0"
    worst = 0.0
    for b in range(len(out)):
        size = want[0][b].square().mean().sqrt()
        if size > 0:
            worst = max(worst, float((out[b] - want[0][b]).square().mean().sqrt() / size))
    return f"{name}: error {worst:.2e} of the output" if worst > 4e-3 else ""


def cases() -> Iterator[tuple[str, Case]]:
    """Small and awkward ones."""
    yield "batch of all lengths, 128 heads", Case(list(LENGTHS), 128, 1)
    yield "all lengths, 16 heads", Case(list(LENGTHS), 16, 1)
    yield "2 queries, 128 heads", Case(list(LENGTHS), 128, 2, spread=3.0)
    yield "4 queries, 16 heads", Case(list(LENGTHS), 16, 4, spread=3.0)
    for batch, heads, q_len in itertools.product((1, 2, 5), (16, 64, 128), (1, 2, 3, 4)):
        lengths = [LENGTHS[(3 * batch + 5 * q_len + 7 * i + heads) % len(LENGTHS)] for i in range(batch)]
        yield f"lengths {lengths}, {heads} heads, {q_len} queries", Case(lengths, heads, q_len)
    for n in LENGTHS:
        yield f"1 x {n}", Case([n], 128, 1)
    yield "300 sequences", Case([(37 * i) % 700 for i in range(300)], 16, 1)
    yield "pages of 256", Case([1000, 4097, 3], 128, 1, page=256)
    yield "pages of 16", Case([1000, 4097, 3, 17], 128, 1, page=16)
    yield "contiguous", Case([1000, 4097, 3], 128, 2, paged=False)
    yield "96 heads", Case([1000, 300], 96, 2)
    yield "5 heads", Case([1000, 300], 5, 3)
    yield "12 queries", Case([1000, 5, 700], 16, 12)
    yield from large()


def large() -> Iterator[tuple[str, Case]]:
    """As large as the rows that are timed, with lengths of all kinds."""
    lengths = [4096 - (97 * i) % 1500 for i in range(128)]
    yield "128 x up to 4k, 128 heads", Case(lengths, 128, 1)
    yield "128 x up to 4k, 16 heads", Case(lengths, 16, 1)
    yield "16 x up to 32k, 16 heads, 2 queries", Case([32768 - 1001 * i for i in range(16)], 16, 2)
    yield "1 x 64k, 128 heads", Case([65536], 128, 1)
    yield "a pool of more than 2^31 numbers", Case([4097, 1000, 3], 128, 1, spare=60_000)


def small() -> Iterator[tuple[str, Case]]:
    """For a checker of memory accesses, under which everything is slow; the last is larger."""
    yield "lengths around a block, 16 heads", Case([0, 1, 65, 130, 300], 16, 1)
    yield "lengths around a block, 128 heads", Case([0, 1, 65, 130, 300], 128, 1)
    yield "4 queries, 16 heads", Case([130, 64, 700], 16, 4)
    yield "pages of 16", Case([100, 17, 257], 128, 1, page=16)
    yield "pages of 256", Case([1000, 3], 128, 1, page=256)
    yield "contiguous", Case([300, 65], 128, 2, paged=False)
    yield "96 heads", Case([300, 65], 96, 2)
    yield "5 heads", Case([300, 65], 5, 3)
    yield "one sequence, shared by all programs", Case([8192], 128, 1)
    yield "40 x 2k", Case([2048 - 31 * i for i in range(40)], 128, 1)


def conforming() -> Iterator[conformance.Case]:
    """Cases of the conformance suite that latent decode serves."""
    for case in LATENT:
        if case.D == 576 and case.dtype != "f32" and not case.q_lengths:  # noqa: SIM102
            if hopper.supports(conformance.make(case, "cuda").checked(return_lse=True).problem) is None:
                yield case


def sanitize(name_has: str) -> int:
    """Each small call of these names twice, compared; how many are wrong."""
    torch.manual_seed(0)
    wrong = 0
    for name, case in small():
        if name_has not in name:
            continue
        want = case.oracle()
        for _ in range(2):
            got = case.call()
            torch.cuda.synchronize()
        text = judge(name, got, want)
        wrong += bool(text)
        print(text or name + ": right", flush=True)
    return wrong


def hidden_nan() -> str:
    """NaN in keys that only later queries see: what is wrong, if anything is."""
    for paged in (True, False):
        case = Case([300, 129, 66], 16, 4, paged=paged)
        clean = case.call()
        for b, n in enumerate(case.lengths):
            at = (b, n - 2) if case.table is None else (int(case.table[b, (n - 2) // 64]), (n - 2) % 64)
            case.cache[at][3] = float("nan")
        out, lse = case.call()
        if not (torch.equal(out[:, :, :2], clean[0][:, :, :2]) and torch.equal(lse[:, :, :2], clean[1][:, :, :2])):
            return "NaN in a hidden key reaches queries before it"
        if not bool(out[:, :, 2:].isnan().all() and lse[:, :, 2:].isnan().all()):
            return "queries that see a NaN are not NaN"
    return ""


def cut_off(heads: int) -> float:
    """By how many last bits (of 2^-24 of it) a score is too small on the average, by the lse of single keys."""
    case = Case([1] * 300, heads, 1)
    want, got = case.oracle()[1], case.call()[1].double()
    return float(((want - got) * want.sign()).sum() / want.abs().sum() * 2**24)


def check() -> list[str]:
    """What is wrong, if anything is."""
    torch.manual_seed(0)
    wrong = []

    def found(text: str) -> None:
        if text:
            wrong.append(text)
            print(text, flush=True)

    for each in conforming():
        stage(str(each))
        try:
            check_case(each, "hopper", "cuda")
        except (Mismatch, Unsupported) as error:
            found(f"{each}: {error}")
    stage("hidden NaN")
    found(hidden_nan())
    for name, case in cases():
        stage(name)
        want = case.oracle()
        found(judge(name, case.call(), want))
        found(judge(f"{name}, remembered", case.call(), want))
        if len(wrong) > 12:
            break
    stage("repeats")
    case = Case([4097, 1000, 65, 2048, 3000], 128, 2)
    first = case.call()
    for i in range(50):
        again = case.call()
        if not (torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])):
            found(f"repeat {i} differs")
            break
    return wrong
