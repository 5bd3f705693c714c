"""What a vLLM worker imports (``worker_extension_cls``) to have NCCL stood in for."""

import nccl_stand_in

from async_rl.weights.vllm_extension import StagingExtension

nccl_stand_in.install(setattr)


class StandInStagingExtension(StagingExtension):
    """The calls of the real one: the server says that it stages, and the NCCL path has to say that it can't."""
