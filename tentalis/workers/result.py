"""What a server's answer to a task is on record."""

from schemas.records import LogprobsMode, PolicySpan, Result, Status, Task, result_id
from schemas.tensors import float32_bytes, int32_bytes
from tentalis.inference.protocol import Completion, Generation
from tentalis.kafka import now_ms


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
    """The result of sample `index` of a task. Raises ValidationError for an answer that cannot be one."""
    spans = (PolicySpan(start=0, policy=generation.model),)
    tokens = int32_bytes(completion.token_ids)
    return Result(
        result_id=result_id(task.task_id, index, spans, tokens, completion.text),
        event_time=now_ms(),
        opened_at=opened_at,
        task=task,
        sample_index=index,
        worker_id=worker_id,
        status=Status.OK,
        text=completion.text,
        prompt_token_ids=int32_bytes(generation.prompt_token_ids),
        response_token_ids=tokens,
        sampler_logprobs=float32_bytes(completion.logprobs),
        logprobs_mode=LogprobsMode.PROCESSED,
        sampling=task.sampling,
        policy_spans=spans,
        finish_reason=completion.finish_reason,
        server_id=server_id,
        elapsed_s=elapsed_s,
    )
