"""What rounds tell, of which requests take in their tokens and policies what came of drafts."""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from draftsmith.decode.engine.recorder import Harvested
from draftsmith.decode.engine.request import Request
from draftsmith.decode.engine.round import DecodeBatch
from draftsmith.decode.engine.rows import Told
from draftsmith.decode.engine.several import SHARED, plain_rounds
from draftsmith.decode.policies.policy import Load, Outcome
from draftsmith.decode.tree_shapes import Plan, rank_path

if TYPE_CHECKING:
    from draftsmith.decode.engine.decoder import Decoder

News = tuple[Request, list[int], bool]  # its new tokens, and whether that was its end
Finished = Callable[[Request, Harvested | None], None]
USUAL = 16  # rounds of a call that drafts


class Flight(NamedTuple):
    """A round on its way: what it will tell, and whom its rows served when it set off."""

    told: Told
    table: Tensor  # of `told`, on the host once `ready`
    ready: torch.cuda.Event | None
    plan: Plan | None
    requests: list[Request | None]
    load: Load
    began: float  # before the drafter took in what it was owed
    started: float | None  # None where rounds like it will be faster


class Hearing:
    """Of a session's batch. context: tokens that a row may hold; finished: called as requests end
    by themselves; clock: of rounds.
    """

    decoder: "Decoder"
    batch: DecodeBatch
    context: int
    finished: Finished | None
    clock: Callable[[], float]
    heard: float | None = None  # when; None where prompts came in since

    def hear(self, flight: Flight) -> list[News]:
        """Take in what a round tells, or several."""
        told = flight.told
        if flight.ready is not None:
            flight.ready.synchronize()
        host = flight.table.cpu()  # the round's only reading of the device
        ticks = self.clock()
        before, self.heard, seconds = self.heard, ticks, None
        if flight.started is not None and (flight.ready is None or before is not None):
            # A device that runs ahead begins a round when the one before has ended.
            seconds = ticks - max(before or 0.0, flight.started)
        whole = (ticks - max(before or 0.0, flight.began)) / max(1, len(told.several))
        if not told.several:
            table = host[:, : 2 * told.levels + 6].tolist()
            return self._hear(flight, (told.levels, told.nodes), table, (seconds, whole), host)
        # What lies around them is shared out as over a call of usual length: trials are shorter.
        rows, each = flight.load.rows, list(told.took)
        usual = self.batch.longest if flight.plan is None else USUAL
        usual = max(min(usual, SHARED // rows), len(each))
        if told.several[:1] == told.several[1:2]:  # the first finds cold caches
            each[0] = min(each[:2])
        beside = None if seconds is None else (seconds - sum(each)) / usual
        took = [(None if beside is None else own + beside, whole) for own in each]
        tables = host.tolist()
        if flight.plan is None and (plain := plain_rounds(tables, rows)) is not None:
            return self._hear_plain(flight, plain, took)
        news: dict[int, News] = {}
        for numbers, size, of_it in zip(tables, told.several, took, strict=True):
            width = 2 * size[0] + 6
            table = [numbers[row * width : row * width + width] for row in range(rows)]
            for request, tokens, ended in self._hear(flight, size, table, of_it):
                known = news[id(request)][1] if id(request) in news else []
                news[id(request)] = request, known + tokens, ended
        return list(news.values())

    def _hear_plain(
        self,
        flight: Flight,
        plain: list[tuple[list[int], int]],
        took: Sequence[tuple[float | None, float]],
    ) -> list[News]:
        """Rounds that drafted nothing, as of `plain_rounds`: each row's at once."""
        now, news = time.perf_counter(), []
        for row, (tokens, active) in enumerate(plain):  # those that were computed
            request = flight.requests[row]
            if request is not None and self.batch.rows.requests[row] is request:
                request.completion.counters.decode_seconds = now - request.started
                news.append(self._news(row, tokens, 0, (0, 0), active=active, bad=0))
        self._remember(news)
        paths: list[tuple[int, ...]] = [()] * len(news)
        for own, whole in took:
            told_of = None, 0, paths, None, flight.load, own, None, whole
            self.decoder.policy.observe(Outcome(*told_of))
        return news

    def _remember(self, news: list[News]) -> None:
        """A drafter's store is to hold whole answers, of which a new one takes the row."""
        drafter = self.decoder.drafter
        if drafter is not None and drafter.remembers and any(ended for *_, ended in news):
            self.decoder.stepper.catch_up(self.batch, self.context)

    def _hear(
        self,
        flight: Flight,
        size: tuple[int, int],
        table: list[list[int]],
        seconds: tuple[float | None, float],
        host: Tensor | None = None,
    ) -> list[News]:
        """A round; size: levels and nodes that were drafted; seconds: its own and the whole, as
        `Outcome` has them; host: the table and what stands beside it.
        """
        told, now, levels = flight.told, time.perf_counter(), size[0]
        listed_BLW = None if host is None else told.listed_BLW(host)
        news, paths, heard = [], [], []
        parts = None if told.tree is None else told.tree.parts
        for row, request in enumerate(flight.requests):
            if request is None or self.batch.rows.requests[row] is not request:
                continue  # ended while this round was on its way
            *found, accepted, n_new, active, bad = table[row]
            path = found[levels + 2 : levels + 2 + accepted]
            if not bad:
                paths.append(rank_path(flight.plan, path))
                heard.append(row)
                request.completion.counters.decode_seconds = now - request.started
            own = size
            if parts is not None:
                nodes = int(parts[1][row]) - 1
                own = min(levels, nodes), nodes
            news.append(self._news(row, found[:n_new], accepted, own, active=active, bad=bad))
            if listed_BLW is not None:
                request.take_listed(listed_BLW[row, : len(news[-1][1])])
        said_BX = None if host is None else told.news_BX(host)
        said_BX = None if said_BX is None else said_BX[heard]
        self._remember(news)
        parts = None if parts is None else (parts[0][heard], parts[1][heard])
        told_of = flight.plan, levels, paths, said_BX, flight.load, seconds[0], parts, seconds[1]
        self.decoder.policy.observe(Outcome(*told_of))
        return news

    def _news(
        self,
        row: int,
        tokens: list[int],
        accepted: int,
        size: tuple[int, int] | None = None,
        *,
        active: int,
        bad: int,
    ) -> News:
        """Hand the row's request its next tokens, the first `accepted` ones drafted; size: levels
        and nodes of their round, None of a prompt's. At its end, also by logits that aren't
        numbers, free the row.
        """
        rows, decoder = self.batch.rows, self.decoder
        request = rows.requests[row]
        assert request is not None
        kept: list[int] = []
        made, ended, error = request.completion, bool(bad), ""
        if bad:
            at = len(made.prompt_tokens) + len(made.tokens)
            error = f"prompt {made.index}: got NaN logits at position {at}, expected numbers; "
            error += "look at the target's weights, or try a wider dtype"
            error = (request.grammar and request.grammar.error) or error
        else:
            kept, stopped = request.cut(tokens)
            ended = stopped or not active
            levels = 0 if size is None else size[0]
            if size is not None:
                made.counters.record(levels, accepted, len(kept), size[1])
            made.accepted += [i < accepted for i in range(len(kept))]
            made.corrected += [i == accepted < levels for i in range(len(kept))]
            made.tokens += kept
            if request.grammar is not None:
                request.grammar.take(kept)
        if ended:
            rows.release(row)
            request.finish(error)
            if decoder.recorder is not None:
                decoder.recorder.finish(made.index, error)
            if self.finished is not None and not error:
                harvest = self.batch.harvest
                self.finished(request, None if harvest is None else harvest.of(row, made))
        return request, kept, ended
