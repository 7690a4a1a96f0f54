"""Classes and functions of ours that vLLM is told by name, so that naming one imports nothing."""

CPU_WORKER = "vllm_dflash.engine.worker.DFlashCPUWorker"
GPU_WORKER = "vllm_dflash.engine.worker.DFlashGPUWorker"
SCHEDULER = "vllm_dflash.engine.scheduler.build_scheduler"
DRAFT_MODEL = "vllm_dflash.model.draft_model:DFlashDraftModel"
SHOW_FIGURES = "vllm_dflash.engine.reporting.prometheus.show_figures"
CPU_RAY_EXECUTOR = "vllm_dflash.cluster.ray_executor.CPURayExecutor"
RAY_EXECUTOR = "vllm_dflash.cluster.ray_executor.DFlashRayExecutor"
