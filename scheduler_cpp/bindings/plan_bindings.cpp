#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "scheduler/execution_plan.h"
#include "scheduler/forward_batch.h"

namespace py = pybind11;

namespace tokenspeed {
namespace {

py::array ReadOnlyView(const int32_t* data, std::vector<py::ssize_t> shape, const py::object& owner) {
  py::array_t<int32_t> view(std::move(shape), data, owner);
  view.attr("setflags")(py::arg("write") = false);
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

py::dict BlockTableLists(const ForwardBatch& batch) {
  py::dict tables;
  for (const auto& [group_id, grid] : batch.block_tables) {
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
  for (const auto& [group_id, grid] : self.cast<const ForwardBatch&>().block_tables) {
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
  py::class_<ExecutionPlan>(module, "ExecutionPlan", "Everything one round asks of the executor.")
      .def_property_readonly(
          "forward", [](const ExecutionPlan& plan) { return std::vector<std::shared_ptr<ForwardBatch>>{plan.forward}; })
      // No tier below the device and no peer yet: these parts of a plan are always empty.
      .def_property_readonly("cache", [](const ExecutionPlan&) { return py::list(); })
      .def_property_readonly("remote_decode", [](const ExecutionPlan&) { return py::none(); })
      .def_property_readonly("remote_prefill", [](const ExecutionPlan&) { return py::none(); })
      .def_readonly("round_number", &ExecutionPlan::round_number)
      .def_readonly("pages_to_zero", &ExecutionPlan::pages_to_zero)
      .def("pages_to_zero_arrays", &ZeroViews, "Per group: int32 [ids], a read-only view.");
}

}  // namespace tokenspeed
