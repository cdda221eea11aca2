#include <pybind11/native_enum.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "scheduler/cache_group_config.h"
#include "scheduler/capacity_model.h"
#include "scheduler/scheduler_config.h"

namespace py = pybind11;

namespace tokenspeed {
namespace {

void BindEnums(py::module_& module) {
  py::native_enum<CacheRetention>(module, "CacheRetention", "enum.Enum", "How long the rows of a group stay readable.")
      .value("FullHistory", CacheRetention::kFullHistory)
      .value("SlidingWindow", CacheRetention::kSlidingWindow)
      .finalize();
  py::native_enum<CacheGroupFamily>(module, "CacheGroupFamily", "enum.Enum", "What a block of a group holds.")
      .value("History", CacheGroupFamily::kHistory)
      .value("State", CacheGroupFamily::kState)
      .finalize();
  py::native_enum<CacheTransferPolicy>(module, "CacheTransferPolicy", "enum.Enum",
                                       "What of a group a prefill worker hands to a decode worker.")
      .value("Unspecified", CacheTransferPolicy::kUnspecified)
      .value("FullSuffix", CacheTransferPolicy::kFullSuffix)
      .value("LatestSnapshot", CacheTransferPolicy::kLatestSnapshot)
      .finalize();
}

CacheGroupConfig MakeGroup(const py::str& group_id, int32_t block_granularity, int32_t total_pages,
                           CacheRetention retention, std::optional<int32_t> sliding_window_tokens,
                           CacheGroupFamily family, int32_t cache_blocks_per_lcm_block,
                           CacheTransferPolicy transfer_policy, int32_t shard_count, bool replayable) {
  return CacheGroupConfig{.group_id = Utf8(group_id),
                          .block_granularity = block_granularity,
                          .total_pages = total_pages,
                          .retention = retention,
                          .sliding_window_tokens = sliding_window_tokens,
                          .family = family,
                          .cache_blocks_per_lcm_block = cache_blocks_per_lcm_block,
                          .transfer_policy = transfer_policy,
                          .shard_count = shard_count,
                          .replayable = replayable};
}

void BindGroup(py::module_& module) {
  py::class_<CacheGroupConfig>(module, "CacheGroupConfig", "One cache group as the scheduler sees it.")
      .def(py::init<>())
      .def(py::init(&MakeGroup), py::arg("group_id"), py::arg("block_granularity"), py::arg("total_pages"),
           py::arg("retention") = CacheRetention::kFullHistory, py::arg("sliding_window_tokens") = py::none(),
           py::arg("family") = CacheGroupFamily::kHistory, py::arg("cache_blocks_per_lcm_block") = 1,
           py::arg("transfer_policy") = CacheTransferPolicy::kUnspecified, py::arg("shard_count") = 1,
           py::arg("replayable") = false)
      .def_property("group_id", TextGetter(&CacheGroupConfig::group_id), TextSetter(&CacheGroupConfig::group_id))
      .def_readwrite("block_granularity", &CacheGroupConfig::block_granularity)
      .def_readwrite("total_pages", &CacheGroupConfig::total_pages)
      .def_readwrite("retention", &CacheGroupConfig::retention)
      .def_readwrite("sliding_window_tokens", &CacheGroupConfig::sliding_window_tokens)
      .def_readwrite("family", &CacheGroupConfig::family)
      .def_readwrite("cache_blocks_per_lcm_block", &CacheGroupConfig::cache_blocks_per_lcm_block)
      .def_readwrite("transfer_policy", &CacheGroupConfig::transfer_policy)
      .def_readwrite("shard_count", &CacheGroupConfig::shard_count)
      .def_readwrite("replayable", &CacheGroupConfig::replayable)
      .def("validate", &CacheGroupConfig::Validate, "Raises ValueError for a group that is wrong by itself.");
}

void BindSchedulerConfig(py::module_& module) {
  py::class_<SchedulerConfig> config(module, "SchedulerConfig", "The complete configuration of one scheduler.");
  py::native_enum<SchedulerConfig::Role>(config, "Role", "enum.Enum", "What part of a request a worker runs.")
      .value("P", SchedulerConfig::Role::kPrefill)
      .value("D", SchedulerConfig::Role::kDecode)
      .value("Fused", SchedulerConfig::Role::kFused)
      .finalize();
  config.def(py::init<>())
      .def_readwrite("prefix_granularity", &SchedulerConfig::prefix_granularity)
      .def_readwrite("max_scheduled_tokens", &SchedulerConfig::max_scheduled_tokens)
      .def_readwrite("max_batch_size", &SchedulerConfig::max_batch_size)
      .def_readwrite("decode_input_tokens", &SchedulerConfig::decode_input_tokens)
      .def_readwrite("overlap_schedule_depth", &SchedulerConfig::overlap_schedule_depth)
      .def_readwrite("role", &SchedulerConfig::role)
      .def_readwrite("num_device_pages", &SchedulerConfig::num_device_pages)
      .def_readwrite("num_host_pages", &SchedulerConfig::num_host_pages)
      .def_readwrite("cache_groups", &SchedulerConfig::cache_groups)
      .def_readwrite("disable_l2_cache", &SchedulerConfig::disable_l2_cache)
      .def_readwrite("enable_l3_storage", &SchedulerConfig::enable_l3_storage)
      .def_readwrite("enable_kv_cache_events", &SchedulerConfig::enable_kv_cache_events)
      .def_readwrite("enable_mixed_prefill_decode", &SchedulerConfig::enable_mixed_prefill_decode)
      .def_readwrite("disable_prefix_cache", &SchedulerConfig::disable_prefix_cache)
      .def_readwrite("prefix_replay_tokens", &SchedulerConfig::prefix_replay_tokens)
      .def_readwrite("reuse_partial_pages", &SchedulerConfig::reuse_partial_pages)
      .def_readwrite("max_overtaken_rounds", &SchedulerConfig::max_overtaken_rounds)
      .def_readwrite("dense_block_tables", &SchedulerConfig::dense_block_tables)
      .def_readwrite("plan_past_max_new_tokens", &SchedulerConfig::plan_past_max_new_tokens)
      .def_readwrite("max_kv_events", &SchedulerConfig::max_kv_events)
      .def_property("weight_version", TextGetter(&SchedulerConfig::weight_version),
                    TextSetter(&SchedulerConfig::weight_version));
}

void BindCapacityModel(py::module_& module) {
  py::class_<CapacityModel>(module, "CapacityModel", "Block and parent demands of a workload, before a pool exists.")
      .def(py::init<SchedulerConfig>(), py::arg("config"))
      .def_property_readonly("num_groups", &CapacityModel::NumGroups)
      .def("single_request_group_pages", &CapacityModel::SingleRequestGroupPages, py::arg("token_limit"))
      .def("concurrent_group_pages", &CapacityModel::ConcurrentGroupPages, py::arg("max_total_tokens"),
           py::arg("max_context_len"))
      .def(
          "lcm_blocks_needed_for",
          [](const CapacityModel& model, const std::vector<int64_t>& group_pages) {
            return model.LcmBlocksNeededFor(group_pages);
          },
          py::arg("group_pages"))
      .def("max_single_request_tokens", &CapacityModel::MaxSingleRequestTokens, py::arg("usable_lcm_blocks"));
}

}  // namespace

void BindConfig(py::module_& module) {
  BindEnums(module);
  BindGroup(module);
  BindSchedulerConfig(module);
  BindCapacityModel(module);
}

}  // namespace tokenspeed
