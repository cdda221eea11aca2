#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "scheduler/cache_operation.h"
#include "scheduler/execution_plan.h"
#include "scheduler/forward_batch.h"

namespace py = pybind11;

namespace tokenspeed {
namespace {

py::array ReadOnlyView(const int32_t* data, std::vector<py::ssize_t> shape, const py::object& owner) {
  py::array_t<int32_t> view(std::move(shape), data, owner);
  py::detail::array_proxy(view.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return view;
}

py::array ReadOnlyView(const std::vector<int32_t>& values, const py::object& owner) {
  return ReadOnlyView(values.data(), {static_cast<py::ssize_t>(values.size())}, owner);
}

// A method that returns a view of one of the batch's lists.
template <std::vector<int32_t> ForwardBatch::*Member>
py::array BatchView(const py::object& self) {
  return ReadOnlyView(self.cast<const ForwardBatch&>().*Member, self);
}

const std::map<std::string, BlockTableGrid>& TablesOf(const ForwardBatch& batch) {
  if (!batch.has_tables) {
    throw std::runtime_error("dense_block_tables is off, so plans carry no block tables; use Scheduler.block_table_views");
  }
  return batch.block_tables;
}

py::dict BlockTableLists(const ForwardBatch& batch) {
  py::dict tables;
  for (const auto& [group_id, grid] : TablesOf(batch)) {
    py::list rows;
    for (std::size_t row = 0; row < grid.rows; ++row) {
      const auto ids = grid.Row(row);
      rows.append(py::cast(std::vector<int32_t>(ids.begin(), ids.end())));
    }
    tables[py::str(group_id)] = rows;
  }
  return tables;
}

py::dict BlockTableViews(const py::object& self) {
  py::dict tables;
  for (const auto& [group_id, grid] : TablesOf(self.cast<const ForwardBatch&>())) {
    tables[py::str(group_id)] = ReadOnlyView(
        grid.ids.data(), {static_cast<py::ssize_t>(grid.rows), static_cast<py::ssize_t>(grid.columns)}, self);
  }
  return tables;
}

py::dict ZeroViews(const py::object& self) {
  py::dict pages;
  for (const auto& [group_id, ids] : self.cast<const ExecutionPlan&>().pages_to_zero) {
    pages[py::str(group_id)] = ReadOnlyView(ids, self);
  }
  return pages;
}

// All of the batch's lists of numbers under their names, as views.
py::dict BatchViews(const py::object& self) {
  const auto& batch = self.cast<const ForwardBatch&>();
  const std::pair<const char*, const std::vector<int32_t>*> lists[] = {
      {"request_pool_indices", &batch.request_pool_indices},
      {"input_lengths", &batch.input_lengths},
      {"prefill_lengths", &batch.prefill_lengths},
      {"input_ids", &batch.input_ids},
      {"shifted_input_ids", &batch.shifted_input_ids},
      {"extend_prefix_lens", &batch.extend_prefix_lens},
      {"extend_replay_lens", &batch.extend_replay_lens},
      {"decode_input_ids", &batch.decode_input_ids}};
  py::dict views;
  for (const auto& [name, values] : lists) views[name] = ReadOnlyView(*values, self);
  return views;
}

py::dict TableChangeViews(const py::object& self) {
  py::dict changes;
  const auto& plan = self.cast<const ExecutionPlan&>();
  for (std::size_t group = 0; group < plan.table_changes.size(); ++group) {
    const BlockTableChanges& change = plan.table_changes[group];
    if (change.spans.empty()) continue;
    constexpr py::ssize_t kSpanFields = 3;
    const auto num_spans = static_cast<py::ssize_t>(change.spans.size()) / kSpanFields;
    changes[py::str((*plan.group_ids)[group])] = py::make_tuple(
        ReadOnlyView(change.spans.data(), {num_spans, kSpanFields}, self), ReadOnlyView(change.ids, self));
  }
  return changes;
}

py::dict CopyLists(const ExecutionPlan& plan) {
  py::dict pages;
  for (const auto& [group_id, copies] : plan.pages_to_copy) {
    py::list pairs;
    for (const BlockCopy& copy : copies) pairs.append(py::make_tuple(copy.source, copy.destination));
    pages[py::str(group_id)] = pairs;
  }
  return pages;
}

py::dict CopyViews(const py::object& self) {
  static_assert(std::is_standard_layout_v<BlockCopy> && sizeof(BlockCopy) == 2 * sizeof(int32_t));
  py::dict pages;
  for (const auto& [group_id, copies] : self.cast<const ExecutionPlan&>().pages_to_copy) {
    const auto* ids = reinterpret_cast<const int32_t*>(copies.data());
    pages[py::str(group_id)] = ReadOnlyView(ids, {static_cast<py::ssize_t>(copies.size()), 2}, self);
  }
  return pages;
}

py::list CacheOperationsOf(const ExecutionPlan& plan) {
  py::list operations;
  if (plan.write_back.has_value()) operations.append(*plan.write_back);
  if (plan.load_back.has_value()) operations.append(*plan.load_back);
  return operations;
}

template <typename Operations>
py::class_<Operations> BindOperations(py::module_& cache, const char* name, const char* doc) {
  return py::class_<Operations>(cache, name, doc)
      .def_readonly("op_ids", &Operations::op_ids)
      .def_readonly("group_ids", &Operations::group_ids)
      .def_readonly("src_pages", &Operations::src_pages)
      .def_readonly("dst_pages", &Operations::dst_pages)
      .def_readonly("content_hashes", &Operations::content_hashes)
      .def_readonly("page_offsets", &Operations::page_offsets);
}

// The submodule is the one that holds the completions of these copies.
void BindCacheOperations(py::module_& module) {
  py::module_ cache = module.def_submodule("Cache");
  BindOperations<WriteBackOp>(cache, "WriteBackOp", "Copies from the device to the host, by operation.")
      .def_readonly("source_pinned", &WriteBackOp::source_pinned);
  BindOperations<LoadBackOp>(cache, "LoadBackOp", "Copies from the host to the device, by operation.")
      .def_readonly("prefetch_from_storage", &LoadBackOp::prefetch_from_storage);
}

void BindBatch(py::module_& module) {
  py::module_ forward = module.def_submodule("Forward", "Model steps.");
  py::class_<ForwardBatch, std::shared_ptr<ForwardBatch>>(forward, "Batch", "One model step; prefill rows come first.")
      .def_readonly("request_ids", &ForwardBatch::request_ids)
      .def_readonly("request_pool_indices", &ForwardBatch::request_pool_indices)
      .def_readonly("input_lengths", &ForwardBatch::input_lengths)
      .def_readonly("prefill_lengths", &ForwardBatch::prefill_lengths)
      .def_readonly("input_ids", &ForwardBatch::input_ids)
      .def_readonly("shifted_input_ids", &ForwardBatch::shifted_input_ids)
      .def_readonly("extend_prefix_lens", &ForwardBatch::extend_prefix_lens)
      .def_readonly("extend_replay_lens", &ForwardBatch::extend_replay_lens)
      .def_readonly("decode_input_ids", &ForwardBatch::decode_input_ids)
      .def_readonly("spec_candidate_ids", &ForwardBatch::spec_candidate_ids)
      .def_property_readonly("block_tables", &BlockTableLists)
      .def("block_tables_arrays", &BlockTableViews, "Per group: int32 [rows, columns], a read-only view.")
      .def("num_extends", &ForwardBatch::NumExtends, "Number of prefill rows.")
      .def("arrays", &BatchViews, "Every list of numbers by name: int32 [entries], read-only views.")
      .def("request_pool_indices_array", &BatchView<&ForwardBatch::request_pool_indices>)
      .def("input_lengths_array", &BatchView<&ForwardBatch::input_lengths>)
      .def("prefill_lengths_array", &BatchView<&ForwardBatch::prefill_lengths>)
      .def("input_ids_array", &BatchView<&ForwardBatch::input_ids>)
      .def("shifted_input_ids_array", &BatchView<&ForwardBatch::shifted_input_ids>)
      .def("extend_prefix_lens_array", &BatchView<&ForwardBatch::extend_prefix_lens>)
      .def("extend_replay_lens_array", &BatchView<&ForwardBatch::extend_replay_lens>)
      .def("decode_input_ids_array", &BatchView<&ForwardBatch::decode_input_ids>);
}

}  // namespace

void BindPlan(py::module_& module) {
  BindBatch(module);
  BindCacheOperations(module);
  py::class_<ExecutionPlan>(module, "ExecutionPlan", "Everything one round asks of the executor.")
      .def_property_readonly(
          "forward", [](const ExecutionPlan& plan) { return std::vector<std::shared_ptr<ForwardBatch>>{plan.forward}; })
      .def_property_readonly("cache", &CacheOperationsOf)
      .def_property_readonly("remote_decode", [](const ExecutionPlan& plan) { return plan.remote_decode; })
      .def_property_readonly("remote_prefill", [](const ExecutionPlan& plan) { return plan.remote_prefill; })
      .def_readonly("round_number", &ExecutionPlan::round_number)
      .def_readonly("pages_to_zero", &ExecutionPlan::pages_to_zero)
      .def("pages_to_zero_arrays", &ZeroViews, "Per group: int32 [ids], a read-only view.")
      .def("table_changes", &TableChangeViews,
           "Per group whose resident tables changed since the last plan: spans, int32 [spans, 3] of request-pool slot, "
           "first column and length; and their entries one after the other, int32 [entries]. Read-only views.")
      .def_property_readonly("pages_to_copy", &CopyLists)
      .def("pages_to_copy_arrays", &CopyViews, "Per group: int32 [copies, (source, destination)], a read-only view.");
}

}  // namespace tokenspeed
