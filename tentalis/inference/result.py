"""Makes the result record of a server's answer to a task."""

from schemas.records import LogprobsMode, PolicySpan, RecordedBy, Result, Sampling, Status, Task, result_id
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.inference.protocol import Completion, Generation
from tentalis.text.timestamps import now_ms


def result_of(
    task: Task,
    index: int,
    generation: Generation,
    completion: Completion,
    *,
    worker_id: str,
    opened_at: int = 0,
    server_id: str = "",
    elapsed_s: float = 0.0,
) -> Result:
    """Returns the result of sample `index` of a task. Raises ValidationError for an invalid answer.

    An answer without tokens, or without log-probs of the distribution that was sampled from, is a good result too: it
    is scored, and `not_trainable_by_ratio` gives the reason why it is not trained on.
    """
    spans = (PolicySpan(start=0, policy=generation.model),)
    prompt = tokens = logprobs = b""
    mode = LogprobsMode.NONE
    if generation.prompt_token_ids is not None and completion.token_ids is not None:
        prompt, tokens = int32_bytes(generation.prompt_token_ids), int32_bytes(completion.token_ids)
        if completion.logprobs is not None:
            logprobs, mode = float32_bytes(completion.logprobs), sampled_mode(generation.logprobs_mode, task.sampling)
    return Result(
        result_id=result_id(task.task_id, index, spans, tokens, completion.text),
        event_time=now_ms(),
        opened_at=opened_at,
        task=task,
        sample_index=index,
        worker_id=worker_id,
        status=Status.OK,
        text=completion.text,
        prompt_token_ids=prompt,
        response_token_ids=tokens,
        sampler_logprobs=logprobs,
        logprobs_mode=mode,
        sampling=task.sampling,
        policy_spans=spans,
        finish_reason=completion.finish_reason,
        server_id=server_id,
        elapsed_s=elapsed_s,
        recorded_by=RecordedBy.WORKER,
    )


def sampled_mode(mode: LogprobsMode, sampling: Sampling) -> LogprobsMode:
    """Returns the mode to record for log-probs of a server with this mode. At temperature 1 without truncation the
    model's own distribution (raw) is the one that was sampled from (processed)."""
    bare = (sampling.temperature, sampling.top_p, sampling.top_k, sampling.constrained) == (1.0, 1.0, 0, False)
    return LogprobsMode.PROCESSED if mode is LogprobsMode.RAW and bare else mode
