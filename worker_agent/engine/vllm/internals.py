"""All names of vLLM that the worker uses, to be checked against each new version of vLLM.

Few of them are part of vLLM's public interface, and any version may change them. Therefore they are looked up
before the engine is loaded, and a version that lacks any is refused with a line that names them.
`ranked_queue.py` hides differences between versions. A test ensures that the worker uses no other names.
docs/vllm-versions.md lists the tested versions and explains how to support the next one.

    python -m worker_agent.engine.vllm.internals    # what the installed vLLM lacks
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from tailrace import TESTED_VLLM
from tailrace.foreign_names import Uses, missing

INTERNALS: Final[Uses] = {
    # ---- configuration
    "vllm.version": "__version__",
    "vllm.platforms": "current_platform",
    "vllm.platforms.interface:Platform": "is_cpu",
    "vllm.engine.arg_utils": "EngineArgs",
    "vllm.engine.arg_utils:EngineArgs": """
        create_engine_config model dtype block_size num_gpu_blocks_override kv_cache_memory_bytes
        reasoning_parser async_scheduling enforce_eager mm_processor_cache_gb
        tensor_parallel_size pipeline_parallel_size
        distributed_executor_backend worker_extension_cls kv_transfer_config""",
    "vllm.config": """
        ModelConfig ParallelConfig VllmConfig
        KVTransferConfig(kv_connector, kv_connector_module_path, kv_role, kv_load_failure_policy)""",
    "vllm.config:VllmConfig": """
        model_config cache_config scheduler_config parallel_config device_config lora_config
        speculative_config structured_outputs_config use_v2_model_runner kv_transfer_config""",
    "vllm.config:KVTransferConfig": """
        kv_connector kv_connector_extra_config kv_role is_kv_consumer has_connector""",
    "vllm.config:ModelConfig": """
        model revision dtype quantization hf_config runner_type max_model_len skip_tokenizer_init
        get_vocab_size get_hidden_size""",
    "vllm.config:CacheConfig": "block_size num_gpu_blocks cache_dtype prefix_caching_hash_algo",
    "vllm.config:SchedulerConfig": """
        async_scheduling scheduler_cls max_num_seqs max_num_batched_tokens long_prefill_token_threshold""",
    "vllm.config:ParallelConfig": """
        tensor_parallel_size pipeline_parallel_size decode_context_parallel_size
        prefill_context_parallel_size nnodes node_rank""",
    "vllm.config:DeviceConfig": "device device_type",
    "vllm.config:LoRAConfig": "max_loras",
    "vllm.config:SpeculativeConfig": "method",
    "vllm.config:StructuredOutputsConfig": "reasoning_parser",
    "vllm.config.kv_events": "KVEventsConfig",
    "vllm.tokenizers": "cached_tokenizer_from_config",
    "vllm.reasoning": "ReasoningParser ReasoningParserManager",
    "vllm.reasoning:ReasoningParser": "is_reasoning_end vocab reasoning_end_str",
    "vllm.reasoning:ReasoningParserManager": "get_reasoning_parser",
    "vllm.utils.math_utils": "cdiv",
    # ---- the engine core, in this process
    "vllm.v1.executor": "Executor",
    "vllm.v1.executor:Executor": "get_class",
    "vllm.v1.executor.multiproc_executor": "MultiprocExecutor(monitor_workers)",
    "vllm.v1.executor.multiproc_executor:WorkerProcHandle": "proc rank",
    "vllm.v1.engine.core": "EngineCore EngineCoreProc",
    "vllm.v1.engine.core:EngineCore": """
        scheduler step_fn post_step batch_queue mm_receiver_cache request_block_hasher
        structured_output_manager add_request abort_requests collective_rpc add_lora reset_prefix_cache
        shutdown""",
    "vllm.v1.engine.core:EngineCoreProc": "_make_ready_response _convert_msgspec_args",
    "vllm.v1.engine": "EngineCoreRequest EngineCoreOutput EngineCoreOutputs FinishReason UtilityOutput "
    "UtilityResult",
    "vllm.v1.engine:EngineCoreRequest": """
        sampling_params prompt_token_ids mm_features lora_request resumable client_index""",
    "vllm.v1.engine:EngineCoreOutput": """
        request_id new_token_ids finish_reason stop_reason prefill_stats""",
    "vllm.v1.engine:EngineCoreOutputs": "outputs utility_output",
    "vllm.v1.engine:UtilityOutput": "call_id result failure_message",
    "vllm.v1.engine:FinishReason": "ERROR",
    "vllm.v1.metrics.stats": "PrefillStats PrefixCacheStats",
    "vllm.v1.metrics.stats:PrefillStats": "num_prompt_tokens num_cached_tokens num_external_cached_tokens",
    "vllm.v1.serial_utils": "MsgpackEncoder MsgpackDecoder",
    "vllm.v1.structured_output:StructuredOutputManager": "grammar_init accept_tokens",
    "vllm.multimodal.cache:BaseMultiModalReceiverCache": "get_and_update_features",
    "vllm.lora.request": "LoRARequest",
    "vllm.lora.request:LoRARequest": "lora_name lora_path lora_int_id load_inplace",
    "vllm.sampling_params": "SamplingParams SamplingType",
    "vllm.multimodal.inputs": "MultiModalFeatureSpec",
    "vllm.sampling_params:SamplingType": "RANDOM_SEED",
    "vllm.sampling_params:SamplingParams": """
        seed sampling_type prompt_logprobs repetition_detection min_tokens max_tokens all_stop_token_ids
        allowed_token_ids logit_bias bad_words_token_ids""",
    "vllm.sampling_params:RepetitionDetectionParams": "max_pattern_size",
    "vllm.envs": "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS",
    # ---- requests and the scheduler
    "vllm.v1.request": "Request RequestStatus",
    "vllm.v1.request:Request": """
        request_id status sampling_params arrival_time max_tokens lora_request mm_features prompt_embeds
        prompt_token_ids prompt_is_token_ids output_token_ids all_token_ids num_prompt_tokens
        num_output_tokens num_tokens num_computed_tokens num_in_flight_tokens num_output_placeholders
        num_stale_output_tokens drop_stale_output num_preemptions block_hashes skip_reading_prefix_cache
        use_structured_output structured_output_request prefill_stats stop_reason from_engine_core_request
        append_output_token_ids get_finished_reason""",
    "vllm.v1.request:RequestStatus": """
        WAITING WAITING_FOR_REMOTE_KVS WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR RUNNING PREEMPTED""",
    "vllm.v1.structured_output.request:StructuredOutputRequest": "grammar _grammar",
    "vllm.v1.core.sched.utils": "check_stop",
    "vllm.v1.core.sched.output": "SchedulerOutput",
    "vllm.v1.core.sched.output:SchedulerOutput": """
        num_scheduled_tokens total_num_scheduled_tokens kv_connector_metadata scheduled_new_reqs
        scheduled_cached_reqs""",
    "vllm.v1.core.sched.output:NewRequestData": "req_id",
    "vllm.v1.core.sched.output:CachedRequestData": "resumed_req_ids",
    "vllm.v1.outputs": "ModelRunnerOutput KVConnectorOutput",
    "vllm.v1.outputs:KVConnectorOutput": "finished_recving invalid_block_ids",
    "vllm.v1.core.sched.request_queue": "RequestQueue create_request_queue",
    "vllm.v1.core.sched.request_queue:RequestQueue": """
        add_request pop_request peek_request prepend_request prepend_requests remove_request
        remove_requests""",
    "vllm.v1.core.sched.async_scheduler": "AsyncScheduler",
    "vllm.v1.core.sched.scheduler": "Scheduler",
    "vllm.v1.core.sched.scheduler:Scheduler": """
        schedule(throttle_prefills) update_from_output add_request has_requests has_finished_requests
        running waiting requests finished_req_ids policy scheduler_config max_num_scheduled_tokens
        connector kv_cache_manager kv_cache_config kv_event_publisher hash_block_size needs_kv_cache_zeroing
        recompute_kv_load_failures get_request_counts reset_prefix_cache
        log_stats make_stats make_spec_decoding_stats connector_prefix_cache_stats
        _inflight_prefills _inflight_prefill_reserved_blocks _preempt_request(drop_stale_output)
        _handle_invalid_blocks _free_request""",
    # ---- the KV cache
    "vllm.v1.core.block_pool": "BlockPool",
    "vllm.v1.core.block_pool:BlockPool": """
        num_gpu_blocks get_num_free_blocks enable_caching enable_kv_cache_events touch free_blocks
        metrics_collector
        get_cached_block(block_hash, kv_cache_group_ids) get_new_blocks
        cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks, block_size,
            kv_cache_group_id)""",
    "vllm.v1.core.kv_cache_manager": "KVCacheManager KVCacheBlocks",
    "vllm.v1.core.kv_cache_manager:KVCacheManager": """
        block_pool coordinator get_blocks get_block_ids pop_blocks_for_free take_new_block_ids cache_blocks
        evict_blocks
        allocate_slots(num_new_computed_tokens, new_computed_blocks, num_external_computed_tokens,
            delay_cache_blocks, reserved_blocks, has_scheduled_reqs)""",
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": "blocks get_block_ids",
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator": "single_type_managers",
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager": "block_size get_num_skipped_tokens",
    "vllm.v1.core.kv_cache_utils": "KVCacheBlock ExternalBlockHash get_block_hash get_none_hash_seed",
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": "block_id block_hash ref_cnt",
    "vllm.v1.core.kv_cache_metrics:KVCacheMetricsCollector": """
        on_block_evicted(block) on_block_allocated(block) on_block_accessed(block) reset""",
    "vllm.v1.kv_cache_interface": """
        KVCacheConfig KVCacheSpec FullAttentionSpec MambaSpec SlidingWindowSpec UniformTypeKVCacheSpecs""",
    "vllm.v1.kv_cache_interface:KVCacheConfig": """
        num_blocks kv_cache_groups kv_cache_tensors kv_cache_layout""",
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": "kv_cache_spec layer_names",
    "vllm.v1.kv_cache_interface:KVCacheTensor": "layers offset layer_stride block_stride",
    "vllm.v1.kv_cache_interface:KVCacheSpec": "page_size_bytes",
    "vllm.v1.kv_cache_interface:MambaSpec": "mamba_cache_mode",
    "vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs": "kv_cache_specs",
    "vllm.distributed.kv_events": """
        MEDIUM_GPU AllBlocksCleared BlockRemoved BlockStored EventBatch EventPublisher""",
    "vllm.distributed.kv_events:EventPublisher": "publish shutdown get_publisher_config",
    "vllm.distributed.kv_events:EventBatch": "events",
    "vllm.distributed.kv_events:BlockStored": "block_hashes group_idx medium",
    "vllm.distributed.kv_events:BlockRemoved": "block_hashes group_idx medium",
    # ---- the KV connector
    "vllm.distributed.kv_transfer": "get_kv_transfer_group",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": """
        KVConnectorBase_V1 KVConnectorMetadata KVConnectorRole SupportsHMA""",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1": """
        _kv_cache_config _get_connector_metadata register_kv_caches handle_preemptions start_load_kv
        get_block_ids_with_load_errors wait_for_layer_load save_kv_layer wait_for_save requires_kv_delivery
        get_num_new_matched_tokens update_state_after_alloc build_connector_meta request_finished
        get_finished update_connector_output shutdown""",
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": "request_finished_all_groups",
    # ---- the model runner
    "vllm.model_executor.layers.logits_processor": "LogitsProcessor",
    "vllm.v1.worker.gpu_worker:Worker": """
        use_v2_model_runner model_runner rank distributed_init_method parallel_config""",
    "vllm.distributed": "get_pp_group",
    "vllm.distributed.utils": "stateless_destroy_torch_distributed_process_group",
    "vllm.distributed.parallel_state:GroupCoordinator": "is_first_rank",
    "vllm.v1.worker.gpu_model_runner": "GPUModelRunner",
    "vllm.v1.worker.gpu_model_runner:GPUModelRunner": """
        device kv_cache_config requests input_batch get_model num_prompt_logprobs uses_mrope
        _init_mrope_positions discard_request_mask sampler intermediate_tensors max_num_tokens
        model_config model""",
    "vllm.model_executor.models.interfaces:SupportsPP": "make_empty_intermediate_tensors",
    "vllm.v1.sample.sampler:Sampler": "topk_topp_sampler",
    "vllm.v1.sample.ops.topk_topp_sampler": "TopKTopPSampler",
    "vllm.v1.sample.ops.topk_topp_sampler:TopKTopPSampler": "forward_cpu",
    "vllm.v1.worker.gpu_input_batch": """
        CachedRequestState(req_id, prompt_token_ids, prompt_embeds, prompt_is_token_ids, mm_features,
            sampling_params, pooling_params, generator, block_ids, num_computed_tokens, output_token_ids,
            lora_request)""",
    "vllm.v1.worker.gpu_input_batch:InputBatch": "req_ids num_reqs vocab_size",
    "vllm.v1.utils:CpuGpuBuffer": "np",
}
"""Names in all versions."""

WAITING: Final[Uses] = {
    "vllm.v1.core.sched.scheduler:Scheduler": """
        kv_holding_waiting deferred_waiting max_num_active_reqs adaptive_long_prefill_threshold
        _handle_blocked_waiting_request""",
}
"""Names from version 0.31 on."""

WAITING_030: Final[Uses] = {
    "vllm.v1.core.sched.scheduler:Scheduler": """
        skipped_waiting max_num_running_reqs _try_promote_blocked_waiting_request
        _is_blocked_waiting_status _enqueue_waiting_request""",
}
"""Their counterparts in version 0.30."""

RUNNER_V2: Final[Uses] = {
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": """
        sample(hidden_states, input_batch, grammar_output) req_states get_model""",
    "vllm.v1.worker.gpu.states:RequestState": "prompt_len",
    "vllm.v1.worker.gpu.input_batch:InputBatch": """
        req_ids num_computed_tokens_np num_scheduled_tokens idx_mapping_np prefill_len_np""",
}
"""Needed if the configuration uses Model Runner V2, which cannot be imported everywhere."""

DATA_PARALLEL: Final[Uses] = {
    "vllm.config:ParallelConfig": """
        data_parallel_size data_parallel_rank data_parallel_rank_local data_parallel_master_ip
        data_parallel_master_port _data_parallel_master_port_list data_parallel_rpc_port
        enable_expert_parallel all2all_backend enable_eplb dp_sync_interval
        stateless_init_dp_group has_unfinished_dp""",
    "vllm.config:ModelConfig": "is_moe",
    "vllm.config:SchedulerConfig": "prefill_schedule_interval",
    "vllm.v1.engine.core:EngineCore": "execute_dummy_batch _should_throttle_prefills",
    "vllm.v1.core.sched.scheduler:Scheduler": "has_unfinished_requests",
}
"""Needed for data-parallel ranks."""

MULTI: Final[Uses] = {
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector": "sub_connectors",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiKVConnectorMetadata": "metadata",
}
"""Needed if there are other KV connectors besides ours."""

_CONNECTORS: Final = "vllm.distributed.kv_transfer.kv_connector.v1"

OFFLOADING: Final[Uses] = {
    f"{_CONNECTORS}.offloading_connector:OffloadingConnector": "connector_scheduler",
    f"{_CONNECTORS}.offloading.scheduler:OffloadingConnectorScheduler": """
        _block_id_to_pending_jobs _req_status""",
}
"""Needed for live migration if one of them is vLLM's own for offloading to host memory."""


class VllmLacks(RuntimeError):
    """The installed vLLM lacks names that the worker needs; the message is one line."""


def require_internals() -> None:
    """Raise VllmLacks unless vLLM has all names. Call before importing any module here that imports vLLM."""
    _refuse(_lacks())


def require_runner_v2() -> None:
    """Raise VllmLacks unless vLLM has all names needed with Model Runner V2."""
    _refuse(missing(RUNNER_V2))


def require_data_parallel() -> None:
    """Raise VllmLacks unless vLLM has all names needed for data-parallel ranks."""
    _refuse(missing(DATA_PARALLEL))


def require_multi() -> None:
    """Raise VllmLacks unless vLLM has all names needed with connectors besides ours."""
    _refuse(missing(MULTI))


def lacks_offloading() -> list[str]:
    """Return the names that the worker uses and this vLLM's OffloadingConnector lacks."""
    return missing(OFFLOADING)


def _lacks() -> list[str]:
    lacks = missing(INTERNALS)
    if missing(WAITING_030):
        lacks += missing(WAITING)
    return lacks


def _refuse(lacks: list[str]) -> None:
    if lacks:
        tested = ", ".join(f"{each}.x" for each in TESTED_VLLM)
        raise VllmLacks(
            f"vLLM {installed_version()} lacks names that workers need: {', '.join(lacks)}; tested "
            f"versions: {tested}"
        )


def installed_version() -> str:
    """Return the version of the installed distribution `vllm`."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        return "(of unknown version)"


def main() -> None:
    """Print the missing names, and exit with 1 if there are any."""
    lacks = _lacks()
    print(f"vLLM {installed_version()} lacks:" if lacks else f"vLLM {installed_version()} has all names")
    print(*lacks, sep="\n")
    sys.exit(bool(lacks))


if __name__ == "__main__":
    main()
