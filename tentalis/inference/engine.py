"""Continuous batching: one thread owns the model, and requests join and leave its batch between two tokens."""

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tentalis.inference.drafting import NgramDrafter
from tentalis.inference.grammar import GrammarFailed, GrammarMatcher
from tentalis.inference.jobs import EngineError, EngineStopped, GeneratedChunk, GenerateJob, RequestFailed, ScoreJob
from tentalis.inference.long_prompt import LongPrompt
from tentalis.inference.prefix_store import MIN_TOKENS, Prefix, PrefixStore
from tentalis.inference.runtime import ModelRuntime
from tentalis.inference.sampling import DrawnTokens, allow_only, draw, penalise, uniforms
from tentalis.inference.scoring import score_batch
from tentalis.inference.text import TextStream
from tentalis.inference.whole_model import WholeModel, whole_model_of

log = logging.getLogger(__name__)

# The cache's rows grow by doubling, its length in steps of this many tokens.
_LENGTH_STEP = 128
# Long prompts in the queue behind the one that is computed, of which a beginning that is kept is looked for.
_LOOKED_AT = 8


@dataclass
class EngineStats:
    """Counters and gauges that the metrics page reads; written by the engine's thread."""

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    scored_tokens: int = 0
    steps: int = 0
    step_rows: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    busy_seconds: float = 0.0


@dataclass
class _Row:
    """A sample that is being decoded. The i-th entry of the engine's list uses cache row i."""

    job: GenerateJob
    index: int
    uniforms: np.ndarray[tuple[int], np.dtype[np.float64]]
    text: TextStream | None
    matcher: GrammarMatcher | None
    length: int  # tokens in the cache
    last: int = -1  # the last sampled token; it is not in the cache yet
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    emitted: int = 0
    drafter: NgramDrafter | None = None

    @property
    def restricted(self) -> bool:
        """True if its grammar or penalties change its logits."""
        params = self.job.params
        return self.matcher is not None or bool(params.presence_penalty or params.frequency_penalty)


@dataclass
class _Admitted:
    """A job that joins the batch with `count` samples. `prefix` has its first `start` tokens."""

    job: GenerateJob
    count: int
    prefix: Prefix | None
    start: int

    @property
    def rest(self) -> list[int]:
        """The tokens to compute."""
        return self.job.prompt[self.start :]


class InferenceEngine:
    """Runs `runtime` in a separate thread. `submit` and `cancel` may be called from any thread.

    `max_batch` bounds the rows decoded together, `cache_bytes` the memory of their keys and values, `prefix_bytes` that
    of ended sequences whose beginning other prompts may have (0: none is kept). `prefill_tokens` and `score_tokens`
    bound the padded tokens of one such pass, and so the time that it delays running requests; a longer prompt is
    computed in chunks of `chunk_tokens`, with a decoding step after each. While at most `draft_rows` rows decode, up to
    `draft_tokens` drafted tokens of each row are computed in one step (0: none).
    """

    def __init__(
        self,
        runtime: ModelRuntime,
        max_batch: int = 64,
        cache_bytes: int = 4 << 30,
        prefill_tokens: int = 2048,
        chunk_tokens: int = 512,
        score_tokens: int = 4096,
        prefix_bytes: int = 512 << 20,
        max_queue: int = 4096,
        threads: int | None = None,
        draft_tokens: int = 0,
        draft_rows: int = 4,
    ) -> None:
        self.runtime = runtime
        self.stats = EngineStats()
        self._max_batch = max_batch
        self._prefill_tokens = prefill_tokens
        self._chunk_tokens = chunk_tokens
        self._score_tokens = score_tokens
        self._max_queue = max_queue
        self._threads = threads
        self._draft_tokens = draft_tokens
        self._draft_rows = draft_rows
        self._cache = runtime.new_cache()
        self.cache_tokens = cache_bytes // self._cache.bytes_per_token
        self._prefixes = PrefixStore(prefix_bytes)
        self._long: LongPrompt | None = None
        self._rows: list[_Row] = []
        self._waiting: deque[GenerateJob] = deque()
        self._scores: deque[ScoreJob] = deque()
        self._inbox: deque[GenerateJob | ScoreJob] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._routed = False
        # Seconds spent on scoring and on decoding since only one of them last had work: neither may starve the other.
        self._score_seconds = 0.0
        self._decode_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="inference-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """True while requests are served."""
        return self._thread.is_alive() and not self._stopping

    def submit(self, job: GenerateJob | ScoreJob) -> None:
        """Queue a job; its results go to its sink. Raises EngineStopped if stopping or the queue is full."""
        with self._wake:
            if not self.alive:
                raise EngineStopped("The server is stopping.")
            if len(self._inbox) + len(self._waiting) + len(self._scores) >= self._max_queue:
                raise EngineStopped(f"The server has {self._max_queue} requests waiting; try again later.")
            self._inbox.append(job)
            self._wake.notify()

    def cancel(self, job: GenerateJob | ScoreJob) -> None:
        """Drop a job at the next step; its sink receives nothing more."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()

    def stop(self, timeout: float = 5.0) -> None:
        """Fail all pending requests with EngineStopped and end the thread after its current step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _run(self) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)  # OpenMP stores this per calling thread
        try:
            with torch.inference_mode():
                while self._collect():
                    self._drop_cancelled()
                    started = time.perf_counter()
                    try:
                        self._run_step()
                    except Exception as error:
                        # The failure is limited to this batch: its requests get the error, the engine continues.
                        log.exception("a batch failed")
                        self._fail_running(
                            EngineError(f"The model failed on this batch: {type(error).__name__}: {error}")
                        )
                    self.stats.busy_seconds += time.perf_counter() - started
                    self._update_gauges()
        finally:
            with self._wake:
                self._stopping = True
            self._fail_everything(EngineStopped("The server stopped before the request was finished."))

    def _collect(self) -> bool:
        """Wait for work. Returns False if the engine must stop."""
        with self._wake:
            while not (self._stopping or self._inbox or self._waiting or self._scores or self._rows):
                self._wake.wait()
            while self._inbox:
                job = self._inbox.popleft()
                if isinstance(job, GenerateJob):
                    self._waiting.append(job)
                else:
                    self._scores.append(job)
            return not self._stopping

    def _run_step(self) -> None:
        """Run one prefill, or a chunk of a long prompt if there is one and then a scoring pass or a decoding step."""
        if self._waiting and self._admit():
            return
        if self._long is not None:
            self._compute_chunk(self._long)
        if self._scores and (not self._rows or self._score_seconds <= self._decode_seconds):
            started = time.perf_counter()
            self._score()
            self._score_seconds += time.perf_counter() - started
        elif self._rows:
            started = time.perf_counter()
            self._decode()
            self._decode_seconds += time.perf_counter() - started
        if not (self._rows and self._scores):
            self._score_seconds = self._decode_seconds = 0.0

    # Joining the batch

    def _admit(self) -> bool:
        """Prefill waiting prompts in order of arrival, as rows and memory allow, up to the first that needs another
        whole model. The first long one begins to be computed in chunks, and is passed over. Returns False if none fits
        now."""
        admitted: list[_Admitted] = []
        rows, longest = len(self._rows), self._longest_row()
        width = start = passed = 0
        for job in self._waiting:
            if admitted and whole_model_of(job.adapter) is not whole_model_of(admitted[0].job.adapter):
                break
            longest_with = max(longest, _rounded(len(job.prompt) + job.params.max_tokens))
            if self._free_rows(longest_with) <= rows:
                break
            if self._waits_for_another(job) and (passed := passed + 1) > _LOOKED_AT:
                continue
            found = self._begun(job)
            one = _Admitted(job, job.n - job.started, *(found or (None, 0)))
            if len(one.rest) > self._chunk_tokens:
                if self._long is None and not self._begin_long(job, found):
                    break
                continue
            width_with, start_with = max(width, len(one.rest)), max(start, one.start)
            if admitted and width_with * (len(admitted) + 1) > self._prefill_tokens:
                break
            if admitted and start_with + width_with > self.runtime.max_positions:
                break  # the padding of a shorter rest has positions too
            if start_with:  # and is written to the cache
                longest_with = max(longest_with, _rounded(start_with + width_with))
            one.count = min(self._free_rows(longest_with) - rows, one.count)
            if one.count <= 0:
                break
            admitted.append(one)
            rows, longest, width, start = rows + one.count, longest_with, width_with, start_with
            if one.count < job.n - job.started:
                break
        if admitted:
            self._prefill(admitted, rows, longest)
        return bool(admitted)

    def _free_rows(self, length: int) -> int:
        """The number of rows of `length` tokens that the cache may have."""
        return min(self._max_batch, max(1, self.cache_tokens // length))

    def _waits_for_another(self, job: GenerateJob) -> bool:
        """True if a job has a long prompt, and that of another job is being computed."""
        long = len(job.prompt) > self._chunk_tokens and job.prefix is None
        return long and self._long is not None and self._long.job is not job

    def _begin_long(self, job: GenerateJob, found: tuple[Prefix, int] | None) -> bool:
        """Begin to compute a long prompt in chunks. Returns False if the job has failed."""
        try:
            self._long = LongPrompt(self.runtime, job, found)
        except RuntimeError as error:  # no memory
            log.exception("a long prompt cannot be computed")
            self._prefixes.clear()
            self._fail(job, EngineError(f"The model failed on this prompt: {type(error).__name__}: {error}"))
            return False
        self.stats.reused_tokens += self._long.done
        return True

    def _begun(self, job: GenerateJob) -> tuple[Prefix, int] | None:
        """The longest beginning of a job's prompt that is computed already, with its number of tokens."""
        if job.prefix is not None:
            return job.prefix, len(job.prefix.tokens)
        return self._prefixes.longest(job.adapter, job.prompt)

    def _compute_chunk(self, prompt: LongPrompt) -> None:
        """Compute a chunk of a long prompt; after the last but one, its job joins the batch like any other."""
        self._routed = False
        count = min(self._chunk_tokens, prompt.remaining - 1)
        try:
            prompt.compute(count)
        except Exception as error:
            log.exception("a chunk of a prompt failed")
            self._fail(prompt.job, EngineError(f"The model failed on this prompt: {type(error).__name__}: {error}"))
            return
        self.stats.prompt_tokens += count
        if prompt.remaining <= self._chunk_tokens:
            prompt.job.prefix, self._long = prompt.prefix(), None

    def _longest_row(self) -> int:
        """The most cache positions that a running row may need."""
        return max((_rounded(len(row.job.prompt) + row.job.params.max_tokens) for row in self._rows), default=0)

    def _prefill(self, admitted: Sequence[_Admitted], rows: int, length: int) -> None:
        """Run each prompt once, copy its keys and values to its other samples' rows, and draw each first token."""
        first = len(self._rows)
        prompt_rows: list[int] = []  # the row of each prompt
        prompt_of_row: list[int] = []  # for each new row, the index of its prompt in `admitted`
        for prompt_index, one in enumerate(admitted):
            job = one.job
            prompt_rows.append(len(self._rows))
            for _ in range(one.count):
                params = job.params
                streams = job.stream or params.stop
                text = TextStream(self.runtime.tokenizer, params.stop, params.include_stop) if streams else None
                numbers = uniforms(params.seed, job.started, params.max_tokens)
                matcher = None if params.grammar is None else params.grammar.matcher()
                row = _Row(job, job.started, numbers, text, matcher, len(job.prompt))
                if self._draft_tokens and not row.restricted:
                    row.drafter = NgramDrafter(job.prompt, params.max_tokens)
                self._rows.append(row)
                job.started += 1
                prompt_of_row.append(prompt_index)
            if job.started == job.n:
                self._waiting.remove(job)
        self._routed = False
        self._reserve_cache(first, rows, length)
        width = max(len(one.rest) for one in admitted)
        tokens = np.zeros((len(admitted), width), dtype=np.int64)
        for prompt_index, one in enumerate(admitted):
            tokens[prompt_index, : len(one.rest)] = one.rest
            if one.prefix is not None:
                self._cache.load_row(prompt_rows[prompt_index], one.prefix.keys, one.prefix.values, one.start)
            if one.prefix is not one.job.prefix:
                self.stats.reused_tokens += one.start
            if one.job.started == one.job.n:
                one.job.prefix = None
            if self._long is not None and self._long.job is one.job:
                self._long = None
        device = self.runtime.device
        self.runtime.route([one.job.adapter for one in admitted])
        if any(one.start for one in admitted):
            starts = torch.tensor([one.start for one in admitted], device=device)
            step = self.runtime.continue_step(self._cache, starts, width, torch.tensor(prompt_rows, device=device))
        else:
            step = self.runtime.prefill_step(self._cache, prompt_rows, width)
        hidden = self.runtime.hidden(torch.from_numpy(tokens).to(device), step)
        last_positions = torch.tensor([len(one.rest) - 1 for one in admitted], device=device)
        last_hidden = hidden[torch.arange(len(admitted), device=device), last_positions]
        copies = [
            (prompt_rows[prompt_index], first + i)
            for i, prompt_index in enumerate(prompt_of_row)
            if prompt_rows[prompt_index] != first + i
        ]
        if copies:
            longest = max(len(one.job.prompt) for one in admitted)
            self._cache.copy_rows([source for source, _ in copies], [target for _, target in copies], longest)
        self.stats.prompt_tokens += sum(len(one.rest) for one in admitted)
        logits = self.runtime.logits(last_hidden)[torch.tensor(prompt_of_row, device=device)]
        new_rows = self._rows[first:]
        drawn = self._draw(logits, [(row, 0) for row in new_rows])
        finite = drawn.finite.tolist()
        for one, number in zip(admitted, prompt_rows, strict=True):
            if one.job.n > 1 and finite[number - first]:
                self._keep(one.job, one.job.prompt, number)
        self._append_tokens(new_rows, [[] for _ in new_rows], drawn)

    def _keep(self, job: GenerateJob, tokens: Sequence[int], row: int) -> None:
        """Keep the keys and values of a sequence, which `row` of the cache holds, for prompts that begin alike."""
        if len(tokens) < MIN_TOKENS or not self._prefixes.room_for(len(tokens) * self._cache.bytes_per_token):
            return
        try:
            self._prefixes.put(Prefix.of(job.adapter, tokens, *self._cache.saved_row(row, len(tokens))))
        except RuntimeError:  # no memory: a copy for others must not fail this request
            log.exception("kept sequences are dropped")
            self._prefixes.clear()

    def _reserve_cache(self, kept_rows: int, rows: int, length: int) -> None:
        """Resize the cache to hold `rows` rows of `length` tokens, keeping the first `kept_rows`; within `cache_tokens`
        where possible."""
        cache = self._cache
        if not kept_rows and cache.rows * cache.length > 4 * rows * length:
            cache.clear()  # a large request has ended: free its memory
        if rows <= cache.rows and length <= cache.length:
            return
        grown = max(_doubled(rows, self._max_batch), cache.rows), max(length, cache.length)
        cache.resize(*(grown if grown[0] * grown[1] <= self.cache_tokens else (rows, length)), kept_rows)

    # Decoding

    def _decode(self) -> None:
        drawn = [(rows, *self._decode_rows(rows, numbers)) for rows, numbers in self._rows_by_model()]
        for row in self._rows:
            row.length += 1
        self.stats.steps += 1
        self.stats.step_rows += len(self._rows)
        # Only now: this moves rows.
        for rows, drafts, tokens in drawn:
            self._append_tokens(rows, drafts, tokens)

    def _rows_by_model(self) -> list[tuple[list[_Row], Tensor | None]]:
        """The rows by the whole model that computes them, with their numbers in the cache; None: all rows, in order."""
        by_model: dict[WholeModel | None, list[int]] = {}
        for number, row in enumerate(self._rows):
            by_model.setdefault(whole_model_of(row.job.adapter), []).append(number)
        if len(by_model) == 1:
            return [(list(self._rows), None)]
        self._routed = False
        device = self.runtime.device
        return [
            ([self._rows[number] for number in numbers], torch.tensor(numbers, device=device))
            for numbers in by_model.values()
        ]

    def _decode_rows(
        self, rows: Sequence[_Row], numbers: Tensor | None, drafting: bool = True
    ) -> tuple[list[list[int]], DrawnTokens]:
        """Returns each row's drafted tokens, and what is drawn: for each row one token, and one after each drafted
        token. `numbers` [n]: their rows in the cache; None: all, in order. `drafting`: False for no drafted tokens."""
        device = self.runtime.device
        if not self._routed:
            self.runtime.route([row.job.adapter for row in rows])
            self._routed = numbers is None
        drafts = self._drafts(rows) if drafting else [[] for _ in rows]
        count = 1 + max(map(len, drafts))
        lengths = torch.tensor([row.length for row in rows], device=device)
        tokens = [[row.last, *draft] + [0] * (count - 1 - len(draft)) for row, draft in zip(rows, drafts, strict=True)]
        step = self.runtime.continue_step(self._cache, lengths, count, numbers)
        hidden = self.runtime.hidden(torch.tensor(tokens, device=device), step)
        places = [(row, ahead) for row, draft in zip(rows, drafts, strict=True) for ahead in range(1 + len(draft))]
        if count == 1:
            return drafts, self._draw(self.runtime.logits(hidden[:, 0]), places)
        self.stats.drafted_tokens += sum(map(len, drafts))
        ends = torch.tensor([1 + len(draft) for draft in drafts], device=device)
        drawn = self._draw(self.runtime.logits(hidden[torch.arange(count, device=device) < ends[:, None]]), places)
        if not drawn.finite.all():
            # Masked NaN is still NaN: a drafted token that overflows would fail a request that never has this token.
            for row, number in zip(rows, step.rows.tolist(), strict=True):
                self._cache.wipe(number, row.length)
            return self._decode_rows(rows, numbers, drafting=False)
        return drafts, drawn

    def _drafts(self, rows: Sequence[_Row]) -> list[list[int]]:
        """The drafted tokens of each row: of none while many rows decode. What a row cannot have as an answer is not
        drafted, nor what would not fit into the cache, where shorter drafts are padded."""
        if len(self._rows) > self._draft_rows:
            return [[] for _ in rows]
        positions = min(self._cache.length, self.runtime.max_positions)
        most = min(self._draft_tokens, positions - 1 - max(row.length for row in rows))
        return [
            [] if row.drafter is None else row.drafter.draft(min(most, row.job.params.max_tokens - len(row.tokens) - 1))
            for row in rows
        ]

    def _draw(self, logits: Tensor, places: Sequence[tuple[_Row, int]]) -> DrawnTokens:
        """Draws from `logits` [N, vocab], each of a row and the number of tokens that it will have by then beyond those
        that it has. Only the first of a row may be restricted."""
        for index, (row, _) in enumerate(places):
            if row.restricted:
                self._restrict(logits[index], row)
        params = [row.job.params for row, _ in places]
        return draw(
            logits,
            np.array([p.temperature for p in params], dtype=np.float32),
            np.array([p.top_p for p in params], dtype=np.float32),
            np.array([p.top_k for p in params], dtype=np.int64),
            np.array([row.uniforms[len(row.tokens) + ahead] for row, ahead in places]),
            max((p.top_logprobs or 0 for p in params), default=0),
        )

    def _restrict(self, logits: Tensor, row: _Row) -> None:
        """Applies the row's penalties and grammar to its logits [vocab]. Other rows' logits stay as they are."""
        params = row.job.params
        if row.tokens and (params.presence_penalty or params.frequency_penalty):
            penalise(logits, row.tokens, params.presence_penalty, params.frequency_penalty)
        if row.matcher is not None and not row.job.cancelled:
            try:
                allow_only(logits, row.matcher.allowed())
            except GrammarFailed as error:
                self._fail(row.job, RequestFailed(str(error)))

    def _append_tokens(self, rows: Sequence[_Row], drafts: Sequence[list[int]], drawn: DrawnTokens) -> None:
        """Append each row's first token of `drawn`, and the next ones while they equal its drafted tokens; send results
        to the sinks, and remove finished rows."""
        tokens, logprobs, finite = drawn.tokens.tolist(), drawn.logprobs.tolist(), drawn.finite.tolist()
        top_tokens = None if drawn.top_tokens is None else drawn.top_tokens.tolist()
        top_logprobs = None if drawn.top_logprobs is None else drawn.top_logprobs.tolist()
        finished: set[int] = set()
        index = -1
        for row, draft in zip(rows, drafts, strict=True):
            first, last = index + 1, index + 1 + len(draft)
            index = last
            for at in range(first, last + 1):
                if not finite[at]:
                    self._fail_not_finite(row.job)
                    break
                if row.job.cancelled:
                    break
                row.length += at > first  # the drafted token before this one is in the cache
                row.last = tokens[at]
                row.tokens.append(tokens[at])
                if row.drafter is not None:
                    row.drafter.append(tokens[at])
                if row.matcher is not None and not self._advance(row, row.matcher):
                    break
                row.logprobs.append(logprobs[at])
                wanted = row.job.params.top_logprobs
                if wanted is not None:
                    best = (
                        []
                        if top_tokens is None or top_logprobs is None
                        else zip(top_tokens[at], top_logprobs[at], strict=True)
                    )
                    row.top.append(list(best)[:wanted])
                self.stats.generated_tokens += 1
                accepted = at < last and tokens[at] == draft[at - first]
                self.stats.accepted_tokens += accepted
                if self._emit(row):
                    finished.add(id(row))
                    break
                if not accepted:
                    break
        if finished:
            for number, row in enumerate(self._rows):
                if id(row) in finished and row.job.n == 1:
                    self._keep(row.job, [*row.job.prompt, *row.tokens][: row.length], number)
        if finished or any(row.job.cancelled for row in rows):
            self._compact([row for row in self._rows if id(row) not in finished and not row.job.cancelled])

    def _emit(self, row: _Row) -> bool:
        """Send a row's unsent tokens if it streams or is finished. Returns True if it is finished."""
        params = row.job.params
        text = None if row.text is None else row.text.push(row.last)
        finish_reason: str | None = None
        stop_reason: str | int | None = None
        if row.text is not None and row.text.stopped_by is not None:
            finish_reason, stop_reason = "stop", row.text.stopped_by
        elif row.last in params.stop_token_ids:
            finish_reason, stop_reason = "stop", row.last
        elif row.last in self.runtime.eos_token_ids and not params.ignore_eos:
            finish_reason = "stop"
        elif len(row.tokens) >= params.max_tokens:
            finish_reason = "length"
        if row.text is not None and text is not None and finish_reason is not None:
            text += row.text.finish()
        if not row.job.stream and finish_reason is None:
            return False
        if row.text is not None and not row.job.stream:
            text = row.text.text
        first = row.emitted
        row.emitted = len(row.tokens)
        top = None if params.top_logprobs is None else row.top[first:]
        row.job.sink(
            GeneratedChunk(row.index, row.tokens[first:], row.logprobs[first:], top, text, finish_reason, stop_reason)
        )
        return finish_reason is not None

    def _advance(self, row: _Row, matcher: GrammarMatcher) -> bool:
        """Tells the row's grammar its new token. Returns False if the request has failed."""
        try:
            matcher.advance(row.last)
        except GrammarFailed as error:
            self._fail(row.job, RequestFailed(str(error)))
            return False
        return True

    def _fail_not_finite(self, job: GenerateJob) -> None:
        """Fail a request whose logits are not finite, and zero its cache rows, so that NaN cannot spread. One that is
        cancelled receives nothing, but leaves its rows to others too."""
        for index, row in enumerate(self._rows):
            if row.job is job:
                self._cache.wipe(index)
        if job.cancelled:
            return
        name = "the base model" if job.adapter is None else f"version {job.adapter.name!r}"
        self._fail(job, EngineError(f"The logits of {name} are not finite for this prompt; its weights are broken."))

    def _fail(self, job: GenerateJob, error: EngineError) -> None:
        """Fail a request; rows of it that are in the batch leave it after this step."""
        job.cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)
        job.sink(error)

    def _compact(self, remaining: list[_Row]) -> None:
        """Keep only the rows in `remaining`, in cache rows 0 .. n-1: rows from the end move into the gaps."""
        remaining_ids = {id(row) for row in remaining}
        index_of = {id(row): index for index, row in enumerate(self._rows)}
        count = len(remaining)
        free_rows = [index for index, row in enumerate(self._rows[:count]) if id(row) not in remaining_ids]
        movers = [row for row in remaining if index_of[id(row)] >= count]
        rows = list(self._rows[:count])
        for hole, row in zip(free_rows, movers, strict=True):
            rows[hole] = row
        if movers:
            length = max(row.length for row in movers)
            self._cache.copy_rows([index_of[id(row)] for row in movers], free_rows, length)
        self._rows = rows
        self._routed = False

    # Scoring

    def _score(self) -> None:
        jobs: list[ScoreJob] = []
        budget = self._score_tokens if not self._rows else self._score_tokens // 4
        width = 0
        while self._scores:
            width = max(width, len(self._scores[0].token_ids))
            if jobs and width * (len(jobs) + 1) > budget:
                break
            if jobs and whole_model_of(self._scores[0].adapter) is not whole_model_of(jobs[0].adapter):
                break
            jobs.append(self._scores.popleft())
        self._routed = False
        try:
            results = score_batch(
                self.runtime,
                [job.token_ids for job in jobs],
                [job.adapter for job in jobs],
                [job.temperature for job in jobs],
                [job.top for job in jobs],
            )
        except Exception as error:
            log.exception("a scoring batch failed")
            for job in jobs:
                job.sink(EngineError(f"Scoring failed: {type(error).__name__}: {error}"))
            return
        self.stats.scored_tokens += sum(len(job.token_ids) for job in jobs)
        for job, result in zip(jobs, results, strict=True):
            if not job.cancelled:
                job.sink(result)

    # Leaving

    def _drop_cancelled(self) -> None:
        if any(job.cancelled for job in self._waiting):
            self._waiting = deque(job for job in self._waiting if not job.cancelled)
        if any(job.cancelled for job in self._scores):
            self._scores = deque(job for job in self._scores if not job.cancelled)
        if self._long is not None and self._long.job.cancelled:
            self._long = None
        if any(row.job.cancelled for row in self._rows):
            self._compact([row for row in self._rows if not row.job.cancelled])

    def _fail_running(self, error: EngineError) -> None:
        jobs = {id(row.job): row.job for row in self._rows}
        self._rows = []
        self._routed = False
        self._cache.clear()
        for job in jobs.values():
            if not job.cancelled:
                job.cancelled = True
                job.sink(error)

    def _fail_everything(self, error: EngineError) -> None:
        with self._wake:
            queued = [*self._inbox, *self._waiting, *self._scores]
            self._inbox.clear()
        self._waiting.clear()
        self._scores.clear()
        self._long = None
        self._prefixes.clear()
        self._fail_running(error)
        for job in queued:
            if not job.cancelled:
                job.sink(error)
        self._update_gauges()

    def _update_gauges(self) -> None:
        self.stats.running = len(self._rows)
        self.stats.waiting = len(self._inbox) + len(self._waiting) + len(self._scores)


def _rounded(length: int) -> int:
    return -(-length // _LENGTH_STEP) * _LENGTH_STEP


def _doubled(rows: int, limit: int) -> int:
    size = 8
    while size < rows:
        size *= 2
    return max(rows, min(size, limit))
