"""StagingExtension: the calls on a vLLM worker by which weights are prepared before generation is paused for them."""

from __future__ import annotations

from typing import Any


class StagingExtension:
    """Mixed into vLLM's worker class (``worker_extension_cls``); reached through ``collective_rpc``."""

    weight_transfer_engine: Any

    def stage_weights(self, update_info: dict[str, Any]) -> bool:
        """Begin to prepare a version. ``False``: this model has to be loaded while generation is paused."""
        engine = self.weight_transfer_engine
        return bool(engine.stage(engine.parse_update_info(update_info)))

    def staged_weights(self) -> bool:
        """Whether it is prepared; raises what went wrong."""
        return bool(self.weight_transfer_engine.stager.ready())
