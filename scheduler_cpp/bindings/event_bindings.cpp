#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <utility>

#include "bindings/bindings.h"
#include "scheduler/execution_event.h"
#include "scheduler/residency_ledger.h"

namespace py = pybind11;

namespace tokenspeed {
namespace {

void BindForwardEvents(py::module_& module) {
  py::module_ forward = module.def_submodule("ForwardEvent", "What became of scheduled forwards.");
  py::class_<ExtendResultEvent>(forward, "ExtendResult", "One scheduled forward landed.")
      .def(py::init<>())
      .def_property("request_id", TextGetter(&ExtendResultEvent::request_id),
                    TextSetter(&ExtendResultEvent::request_id))
      .def_readwrite("tokens", &ExtendResultEvent::tokens)
      .def_readwrite("round_number", &ExtendResultEvent::round_number)
      .def_readwrite("forced_tokens", &ExtendResultEvent::forced_tokens)
      .def_readwrite("spec_candidate_ids", &ExtendResultEvent::spec_candidate_ids);
  py::class_<FinishEvent>(forward, "Finish", "Generation ended normally.")
      .def(py::init<>())
      .def_property("request_id", TextGetter(&FinishEvent::request_id), TextSetter(&FinishEvent::request_id));
  py::class_<AbortEvent>(forward, "Abort", "Drop the request, in any state.")
      .def(py::init<>())
      .def_property("request_id", TextGetter(&AbortEvent::request_id), TextSetter(&AbortEvent::request_id));
  py::class_<RetractEvent>(forward, "Retract", "The forward was not run; the request starts again.")
      .def(py::init<>())
      .def_property("request_id", TextGetter(&RetractEvent::request_id), TextSetter(&RetractEvent::request_id));
  py::class_<UpdateReserveNumTokensEvent>(forward, "UpdateReserveNumTokens",
                                          "Tokens that the next decode step must grow by.")
      .def(py::init<>())
      .def_property("request_id", TextGetter(&UpdateReserveNumTokensEvent::request_id),
                    TextSetter(&UpdateReserveNumTokensEvent::request_id))
      .def_readwrite("reserve_num_tokens_in_next_schedule_event",
                     &UpdateReserveNumTokensEvent::reserve_num_tokens_in_next_schedule_event);
}

void BindCacheEvents(py::module_& module) {
  py::module_ cache = module.def_submodule("Cache", "Copies between tiers, and their completions.");
  py::class_<WriteBackDoneEvent>(cache, "WriteBackDoneEvent")
      .def(py::init<>())
      .def_readwrite("op_id", &WriteBackDoneEvent::op_id);
  py::class_<LoadBackDoneEvent>(cache, "LoadBackDoneEvent")
      .def(py::init([](uint32_t op_id, bool success) { return LoadBackDoneEvent{op_id, success}; }), py::arg("op_id"),
           py::arg("success"))
      .def_readwrite("op_id", &LoadBackDoneEvent::op_id)
      .def_readwrite("success", &LoadBackDoneEvent::success);
}

template <typename Event>
void BindPeerEvent(py::module_& module, const char* name) {
  py::class_<Event>(module, name)
      .def(py::init([](const py::str& request_id) { return Event{Utf8(request_id)}; }), py::arg("request_id"))
      .def_readonly("request_id", &Event::request_id);
}

void BindPeerEvents(py::module_& module) {
  py::module_ peer = module.def_submodule("PD", "Events of a prefill or decode peer.");
  BindPeerEvent<BootstrappedEvent>(peer, "BootstrappedEvent");
  BindPeerEvent<FailedEvent>(peer, "FailedEvent");
  BindPeerEvent<SucceededEvent>(peer, "SucceededEvent");
  py::class_<RemotePrefillDoneEvent>(peer, "RemotePrefillDoneEvent")
      .def(py::init([](const py::str& request_id, int32_t bootstrap_token) {
             return RemotePrefillDoneEvent{Utf8(request_id), bootstrap_token};
           }),
           py::arg("request_id"), py::arg("bootstrap_token"))
      .def_readonly("request_id", &RemotePrefillDoneEvent::request_id)
      .def_readwrite("bootstrap_token", &RemotePrefillDoneEvent::bootstrap_token);
}

void BindResidencyEvents(py::module_& module) {
  py::module_ residency = module.def_submodule("KVEvent", "Prefixes that came into or left the device cache.");
  py::class_<BlockStoredEvent>(residency, "BlockStored")
      .def_property_readonly("kind", [](const BlockStoredEvent&) { return "BlockStored"; })
      .def_readonly("block_hashes", &BlockStoredEvent::block_hashes)
      .def_readonly("parent_block_hash", &BlockStoredEvent::parent_block_hash)
      .def_readonly("token_ids", &BlockStoredEvent::token_ids)
      .def_readonly("block_size", &BlockStoredEvent::block_size)
      .def_readonly("cache_salt", &BlockStoredEvent::cache_salt);
  py::class_<BlockRemovedEvent>(residency, "BlockRemoved")
      .def_property_readonly("kind", [](const BlockRemovedEvent&) { return "BlockRemoved"; })
      .def_readonly("block_hashes", &BlockRemovedEvent::block_hashes);
}

}  // namespace

void BindEvents(py::module_& module) {
  BindForwardEvents(module);
  BindCacheEvents(module);
  BindPeerEvents(module);
  BindResidencyEvents(module);
  py::class_<ExecutionEvent>(module, "ExecutionEvent", "Events to apply together, in order of addition.")
      .def(py::init<>())
      .def(
          "add_event",
          [](py::object self, SchedulerEvent event) {
            self.cast<ExecutionEvent&>().AddEvent(std::move(event));
            return self;
          },
          py::arg("event"), "Appends a copy of the event; returns this object.");
}

}  // namespace tokenspeed
