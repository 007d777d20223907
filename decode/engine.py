"""The decoding loop: draft, verify, commit; over batches whose rows come and go on their own.

    decoder = Decoder.from_pretrained("target", "drafter", K=4)
    decoder.generate(["def main("], SamplingParams(max_new_tokens=64))

The answer is a function of target, prompt and seed alone. `drafter=None` is plain decoding through
the same code with nothing drafted.

Shapes: B rows, N nodes, L = D + 1 tokens that one round can emit, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.decode import sampling
from draftsmith.decode.drafters.base import Drafter, Round
from draftsmith.decode.drafters.lm import context_of
from draftsmith.decode.drafters.load import load_drafter
from draftsmith.decode.kv import KVPool
from draftsmith.decode.request import Completion, Event, Prompt, Request, eos_ids, open_request
from draftsmith.decode.rows import Rows
from draftsmith.decode.runner import Runner, Seen, round_up
from draftsmith.decode.sampling import SamplingParams, choose, position_keys, transform
from draftsmith.decode.token_tree import COUPLED, TokenTree, Topology, chain
from draftsmith.decode.verify import RULES, Noise, RuleInfo
from draftsmith.models.target import TargetSpec, check_split, load_target
from draftsmith.models.tokenizer import vocab_size


@dataclass
class _Batch:
    """One call's state: rows, KV, parameters, and the largest committed length, a plain int."""

    rows: Rows
    pool: KVPool
    params: SamplingParams
    top: int = 0


class Decoder:
    """A target, its tokenizer and, unless decoding is plain, a drafter.

    K: drafted tokens a round; batch_size: rows; rule: a key of `verify.RULES` (at temperature 0
    every rule is the coupled one: token identity). same_shape: draft, but accept nothing: plain
    decoding through the very products that speculative decoding makes, the baseline for exact
    comparison where rounding depends on shapes (bf16).
    """

    def __init__(
        self,
        target: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        drafter: Drafter | None = None,
        *,
        K: int = 4,
        batch_size: int = 1,
        rule: str = "coupled",
        same_shape: bool = False,
    ) -> None:
        if not 1 <= K <= 64:
            raise ValueError(f"K: got {K}, expected 1 to 64; drafter=None is plain decoding")
        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}, expected at least 1")
        if rule not in RULES:
            raise ValueError(f"rule: got {rule!r}, expected one of {sorted(RULES)}")
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size(tokenizer)
        self.runner = Runner(target, self.vocab_size)
        self.drafter, self.K, self.batch_size, self.rule = drafter, K, batch_size, rule
        self.same_shape = same_shape
        self._decoding = False
        self.context = context_of(target)
        if drafter is not None:
            self.context = min(self.context, drafter.context)
        self.eos_ids = eos_ids(target, tokenizer)

    @classmethod
    def from_pretrained(
        cls,
        target: str,
        drafter: str | None = None,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        allow_target_mismatch: bool = False,
        **settings: Any,
    ) -> "Decoder":
        """Load a target folder and, beside it, a drafter folder, "ngram", or None for plain
        decoding.

        settings: K, batch_size, rule, same_shape. Errors of `open_drafter` and `load_target` pass.
        """
        model, tokenizer = load_target(TargetSpec(target, dtype=dtype), torch.device(device))
        check_split(model)
        loaded = load_drafter(
            drafter, model, tokenizer, allow_target_mismatch=allow_target_mismatch
        )
        return cls(model, tokenizer, loaded, **settings)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        indices: Sequence[int] | None = None,
    ) -> list[Completion]:
        """The completions, in the order of the prompts (texts or token ids).

        indices: each prompt's global number, from which its noise seed is made; by default 0, 1,
        ... ValueError for an empty prompt or one that leaves no room in the context.
        """
        done = {}
        for request, _, finished in self._run(prompts, params, indices):
            if finished:
                done[request.completion.index] = request.completion
        return [done[index] for index in range(len(prompts))]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        indices: Sequence[int] | None = None,
    ) -> Iterator[Event]:
        """Yields an Event for each request after each round, as tokens are emitted. Text comes in
        whole characters: bytes of an unfinished one are held back.
        """
        for request, tokens, finished in self._run(prompts, params, indices):
            text = request.next_text(self.tokenizer, finished)
            completion = request.completion if finished else None
            yield Event(request.completion.index, tokens, text, completion)

    def _run(
        self, prompts: Sequence[Prompt], params: SamplingParams, indices: Sequence[int] | None
    ) -> Iterator[tuple[Request, list[int], bool]]:
        """Yields (request, its new tokens, whether that was its end)."""
        if self._decoding:
            raise ValueError(
                "this decoder is in the middle of another stream, whose rows its drafter holds; "
                "finish or close that stream first, or make a second Decoder"
            )
        self._decoding = True
        try:
            yield from self._rounds(self._open(prompts, params, indices))
        finally:
            self._decoding = False

    def _rounds(self, batch: _Batch) -> Iterator[tuple[Request, list[int], bool]]:
        rows = batch.rows
        while rows.waiting or rows.busy:
            if rows.waiting and rows.free:
                yield from self._admit(batch)
                continue
            tree, emitted_BL, n_accepted_B = self._round(batch)
            n_new_B = self._commit(batch, emitted_BL, n_accepted_B)
            # The round's only reading of the device.
            told = torch.cat(
                [emitted_BL, n_accepted_B[:, None], n_new_B[:, None], rows.active_B[:, None]], 1
            ).tolist()
            now = time.perf_counter()
            drafted = tree.topology.levels
            batch.top = 1
            for row in rows.busy:
                *emitted, accepted, n_new, active = told[row]
                request = rows.requests[row]
                assert request is not None
                request.completion.counters.record(drafted, accepted, n_new)
                request.completion.counters.decode_seconds = now - request.started
                request.completion.accepted += [i < accepted for i in range(n_new)]
                batch.top = max(batch.top, request.length + n_new)
                yield self._deliver(rows, row, emitted[:n_new], finished=not active)

    def _open(
        self, prompts: Sequence[Prompt], params: SamplingParams, indices: Sequence[int] | None
    ) -> _Batch:
        if indices is not None and len(indices) != len(prompts):
            raise ValueError(f"indices: got {len(indices)} for {len(prompts)} prompts")
        requests = [
            open_request(
                prompt,
                i,
                i if indices is None else indices[i],
                tokenizer=self.tokenizer,
                params=params,
                context=self.context,
            )
            for i, prompt in enumerate(prompts)
        ]
        stops = (
            params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *self.eos_ids)
        )
        batch = max(1, min(self.batch_size, len(requests)))
        longest = max((len(r.completion.prompt_tokens) + r.limit for r in requests), default=1)
        slots = longest + (1 if self.drafter is None else self.drafter.nodes(self.K)) + 1
        with torch.inference_mode():
            rows = Rows(batch, stops, self.runner.device)
            rows.waiting.extend(requests)
            if self.drafter is not None:
                self.drafter.reset(batch, round_up(slots))
            return _Batch(rows, self.runner.pool(batch, slots), params)

    @torch.inference_mode()
    def _admit(self, batch: _Batch) -> list[tuple[Request, list[int], bool]]:
        """Prefill as many waiting prompts as rows are free; each gets its first token."""
        rows, device = batch.rows, self.runner.device
        started = time.perf_counter()
        free = rows.free[: len(rows.waiting)]
        requests = [rows.waiting.popleft() for _ in free]
        prompts = [request.completion.prompt_tokens for request in requests]
        lens = [len(prompt) for prompt in prompts]
        rows_R = torch.tensor(free, device=device)
        lens_R = torch.tensor(lens, device=device)
        tokens_RN = torch.tensor(
            [prompt + [0] * (max(lens) - len(prompt)) for prompt in prompts], device=device
        )
        logits_RV = self.runner.prefill(batch.pool, rows_R, tokens_RN, lens_R)
        seeds_R = torch.tensor([request.seed for request in requests], device=device)
        race_RLV = self._race(seeds_R, lens_R[:, None], batch.params)
        race_RV = None if race_RLV is None else race_RLV[:, 0]
        pending_R = choose(self._transform(logits_RV, batch.params), race_RV)
        rows.admit(rows_R, lens_R, pending_R, requests)
        if self.drafter is not None:
            self.drafter.prefill(rows_R, tokens_RN, lens_R, pending_R)
        firsts, active = pending_R.tolist(), rows.active_B[rows_R].tolist()
        now = time.perf_counter()
        news = []
        for row, request, first, alive in zip(free, requests, firsts, active, strict=True):
            rows.requests[row] = request
            request.started = now
            request.completion.counters.prefill_seconds = now - started
            request.completion.accepted.append(False)
            batch.top = max(batch.top, request.length)
            news.append(self._deliver(rows, row, [first], finished=not alive))
        return news

    def _deliver(
        self, rows: Rows, row: int, tokens: list[int], *, finished: bool
    ) -> tuple[Request, list[int], bool]:
        """Hand tokens to the row's request; at its end, free the row."""
        request = rows.requests[row]
        assert request is not None
        completion = request.completion
        completion.tokens += tokens
        if finished:
            rows.requests[row] = None
            stopped = completion.tokens[-1] in rows.stop_ids
            completion.finish_reason = "stop" if stopped else "length"
            shown = completion.tokens[:-1] if stopped else completion.tokens
            completion.text = str(self.tokenizer.decode(shown))
        return request, tokens, finished

    @torch.inference_mode()
    def _round(self, batch: _Batch) -> tuple[TokenTree, Tensor, Tensor]:
        """Draft and verify: the tree, the tokens of the kept path then the next one, and how many
        of them were drafted.
        """
        rows, params, pool = batch.rows, batch.params, batch.pool
        levels = self.K if self.drafter is not None else 0
        step_L = torch.arange(levels + 1, device=self.runner.device)
        positions_BL = rows.lens_B[:, None] + step_L
        rule = self._rule(params)
        shared_BLV = None
        if rule.law == COUPLED:
            shared_BLV = self._race(rows.seeds_B, positions_BL + 1, params)
        tree = self._propose(batch, levels, positions_BL, shared_BLV)

        tokens_BN, topology = tree.tokens_BN, tree.topology
        width = min(round_up(batch.top + tokens_BN.shape[1]), pool.slots)
        block = None if topology.is_chain else topology.ancestors
        seen = Seen(rows.lens_B, width, block, topology.depth)
        depth_BN = rows.lens_B[:, None] + topology.depth
        slots_BN = rows.lens_B[:, None] + torch.arange(tokens_BN.shape[1], device=tokens_BN.device)
        hidden_BNH = self.runner.verify(pool, tokens_BN, depth_BN, slots_BN, seen)
        p_logits_BNV = self._transform(self.runner.logits(hidden_BNH), params)

        noise = self._noise(batch, topology, shared_BLV)
        verdict = rule.verify(tree, p_logits_BNV, noise, None)
        n_accepted_B, next_B = verdict.n_accepted_B, verdict.next_B
        if self.same_shape:
            n_accepted_B = torch.zeros_like(n_accepted_B)
            race_BV = None if shared_BLV is None else shared_BLV[:, 0]
            next_B = choose(p_logits_BNV[:, 0], race_BV)
        elif not topology.is_chain:
            levels_L = torch.arange(topology.levels + 1, device=self.runner.device)
            pool.commit(rows.lens_B[:, None] + verdict.path_BL, rows.lens_B[:, None] + levels_L)
        kept_BL = tokens_BN.gather(1, verdict.path_BL)
        emitted_BL = torch.cat([kept_BL[:, 1:], kept_BL[:, :1]], 1)
        return tree, emitted_BL.scatter(1, n_accepted_B[:, None], next_B[:, None]), n_accepted_B

    def _propose(
        self, batch: _Batch, levels: int, positions_BL: Tensor, shared_BLV: Tensor | None
    ) -> TokenTree:
        rows, params = batch.rows, batch.params
        if self.drafter is None:
            return TokenTree(rows.pending_B[:, None], chain(0, self.runner.device), COUPLED)
        rule = self._rule(params)
        race_BDV = None if shared_BLV is None else shared_BLV[:, :levels]
        if rule.law != COUPLED:
            # Keyed by the round too: a level drafted again after a rejection needs fresh noise.
            seeds_B = position_keys(rows.seeds_B, rows.rounds_B[:, None], sampling.DRAFT)[:, 0]
            race_BDV = self._race(seeds_B, positions_BL[:, :levels] + 1, params)
        return self.drafter.propose(
            Round(levels, rows.lens_B, rows.pending_B, batch.top, params, rule.law, race_BDV)
        )

    @torch.inference_mode()
    def _commit(self, batch: _Batch, emitted_BL: Tensor, n_accepted_B: Tensor) -> Tensor:
        n_new_B = batch.rows.advance(emitted_BL, n_accepted_B)
        if self.drafter is not None:
            self.drafter.extend(emitted_BL, n_new_B)
        return n_new_B

    def _noise(self, batch: _Batch, topology: Topology, shared_BLV: Tensor | None) -> Noise:
        rows, params = batch.rows, batch.params
        if self._rule(params).law == COUPLED:
            return Noise(None if shared_BLV is None else shared_BLV[:, : topology.levels + 1])
        rounds_B1 = rows.rounds_B[:, None]
        accept_B = position_keys(rows.seeds_B, rounds_B1, sampling.ACCEPT)[:, 0]
        node_N = torch.arange(topology.nodes, device=self.runner.device).expand(
            rows.lens_B.shape[0], -1
        )
        residual_B1 = position_keys(rows.seeds_B, rounds_B1, sampling.RESIDUAL)
        return Noise(
            accept_BN=sampling.uniform(position_keys(accept_B, node_N)),
            log_residual_BV=sampling.log_race(residual_B1, self.vocab_size)[:, 0],
        )

    def _rule(self, params: SamplingParams) -> RuleInfo:
        """The rule asked for; at temperature 0 every rule is the coupled one."""
        return RULES["coupled" if params.greedy else self.rule]

    def _race(self, seeds_B: Tensor, positions_BD: Tensor, params: SamplingParams) -> Tensor | None:
        if params.greedy:
            return None
        return sampling.log_race(position_keys(seeds_B, positions_BD), self.vocab_size)

    def _transform(self, logits: Tensor, params: SamplingParams) -> Tensor:
        return transform(logits, params.temperature, params.top_k, params.top_p)
