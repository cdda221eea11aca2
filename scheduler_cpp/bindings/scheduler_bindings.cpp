#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bindings/bindings.h"
#include "core/exclusive.h"
#include "scheduler/scheduler.h"

namespace py = pybind11;

namespace tokenspeed {
namespace {

// Planning releases the interpreter lock, so a second call may come meanwhile.
class GuardedScheduler {
 public:
  explicit GuardedScheduler(SchedulerConfig config) : scheduler_("Scheduler", std::move(config)) {}

  template <typename Call>
  decltype(auto) Use(Call&& call) {
    return scheduler_.Use(std::forward<Call>(call));
  }

 private:
  Exclusive<Scheduler> scheduler_;
};

// Turns a method of Scheduler into one of GuardedScheduler.
template <typename Result, typename... Args>
auto Guarded(Result (Scheduler::*method)(Args...)) {
  return [method](GuardedScheduler& self, Args... args) -> Result {
    return self.Use([&](Scheduler& scheduler) -> Result { return (scheduler.*method)(std::forward<Args>(args)...); });
  };
}

template <typename Result, typename... Args>
auto Guarded(Result (Scheduler::*method)(Args...) const) {
  return [method](GuardedScheduler& self, Args... args) -> Result {
    return self.Use([&](Scheduler& scheduler) -> Result { return (scheduler.*method)(std::forward<Args>(args)...); });
  };
}

void SetWeightVersion(GuardedScheduler& self, const py::str& weight_version) {
  std::string version = Utf8(weight_version);
  self.Use([&](Scheduler& scheduler) { scheduler.SetWeightVersion(std::move(version)); });
}

ExecutionPlan NextPlan(GuardedScheduler& self) {
  const py::gil_scoped_release release;
  return self.Use([](Scheduler& scheduler) { return scheduler.NextExecutionPlan(); });
}

// Taken without conversion: whatever is not a contiguous int32 array is a TypeError.
using IntArray = py::array_t<int32_t, py::array::c_style>;

std::span<const int32_t> Entries(const char* name, const IntArray& array) {
  if (array.ndim() != 1) {
    throw std::invalid_argument(std::string(name) + " must have one dimension, got " + std::to_string(array.ndim()));
  }
  return {array.data(), static_cast<std::size_t>(array.size())};
}

int32_t TokenAt(PyObject* item, std::size_t index) {
  const py::object number = py::reinterpret_steal<py::object>(PyNumber_Index(item));
  if (!number) {
    PyErr_Clear();
    throw py::type_error("tokens[" + std::to_string(index) + "] must be an int, got " + Py_TYPE(item)->tp_name);
  }
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
  if (overflow != 0 || value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    // A TypeError, as for every other number that has no place in its field.
    throw py::type_error("tokens[" + std::to_string(index) + "] must fit 32 bits, got " + std::string(py::str(number)));
  }
  return static_cast<int32_t>(value);
}

// Whether a list holds nothing but plain ints of 32 bits; then `values` are these. Runs no Python code.
bool PlainTokens(PyObject* list, std::vector<int32_t>& values) {
  values.resize(static_cast<std::size_t>(PyList_GET_SIZE(list)));
  for (std::size_t index = 0; index < values.size(); ++index) {
    PyObject* item = PyList_GET_ITEM(list, static_cast<Py_ssize_t>(index));
    if (!PyLong_CheckExact(item)) return false;
    int overflow = 0;
    const long value = PyLong_AsLongAndOverflow(item, &overflow);
    if (overflow != 0 || value != static_cast<int32_t>(value)) return false;
    values[index] = static_cast<int32_t>(value);
  }
  return true;
}

// Of an int32 array, or of any sequence of integers.
std::vector<int32_t> TokensOf(const py::object& tokens) {
  std::vector<int32_t> values;
  if (IntArray::check_(tokens)) {
    const auto array = py::reinterpret_borrow<IntArray>(tokens);
    if (array.ndim() == 1) return {array.data(), array.data() + array.size()};
  }
  if (py::isinstance<py::str>(tokens) || py::isinstance<py::bytes>(tokens)) {
    throw py::type_error("tokens must be a sequence of ints, got text");
  }
  if (PyList_CheckExact(tokens.ptr()) != 0 && PlainTokens(tokens.ptr(), values)) return values;
  if (PySequence_Check(tokens.ptr()) == 0) throw py::type_error("tokens must be a sequence of ints");
  // A copy, which no item can change while it is asked for its value.
  const auto items = py::reinterpret_steal<py::tuple>(PySequence_Tuple(tokens.ptr()));
  if (!items) throw py::error_already_set();
  values.clear();
  for (std::size_t index = 0; index < items.size(); ++index) {
    values.push_back(TokenAt(PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(index)), index));
  }
  return values;
}

void AdvanceRows(GuardedScheduler& self, const IntArray& slots, const IntArray& token_counts, const IntArray& tokens,
                 int64_t round_number) {
  const RowResults rows{.slots = Entries("slots", slots),
                        .token_counts = Entries("token_counts", token_counts),
                        .tokens = Entries("tokens", tokens),
                        .round = round_number};
  self.Use([&](Scheduler& scheduler) { scheduler.AdvanceRows(rows); });
}

void FinishRows(GuardedScheduler& self, const IntArray& slots) {
  const auto entries = Entries("slots", slots);
  self.Use([&](Scheduler& scheduler) { scheduler.FinishRows(entries); });
}

py::dict BlockTableArrays(GuardedScheduler& self) {
  py::dict arrays;
  for (auto& [group_id, view] : self.Use([](Scheduler& scheduler) { return scheduler.BlockTableViews(); })) {
    const auto rows = static_cast<py::ssize_t>(view.rows);
    const auto columns = static_cast<py::ssize_t>(view.columns);
    const int32_t* ids = view.ids.get();
    // The capsule keeps the memory alive, also when the grid has moved on to a wider one.
    auto* owner = new std::shared_ptr<const int32_t[]>(std::move(view.ids));
    const py::capsule base(owner, [](void* held) { delete static_cast<std::shared_ptr<const int32_t[]>*>(held); });
    py::array_t<int32_t> array({rows, columns}, ids, base);
    py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
    arrays[py::str(group_id)] = std::move(array);
  }
  return arrays;
}

py::array_t<int32_t> LcmBlockUses(GuardedScheduler& self) {
  const std::vector<int32_t> uses = self.Use([](Scheduler& scheduler) { return scheduler.LcmBlockUses(); });
  return py::array_t<int32_t>(static_cast<py::ssize_t>(uses.size()), uses.data());
}

std::vector<std::string> HashTokens(GuardedScheduler& self, const std::vector<int32_t>& tokens,
                                    const py::str& cache_salt) {
  const std::string salt = Utf8(cache_salt);
  return self.Use([&](Scheduler& scheduler) { return scheduler.PrefixHashesForTokens(tokens, salt); });
}

std::tuple<std::vector<std::string>, std::vector<std::string>, std::vector<int32_t>> ExpandKeys(
    GuardedScheduler& self, const std::vector<std::string>& content_hashes) {
  auto keys = self.Use([&](Scheduler& scheduler) { return scheduler.ExpandPrefixKeys(content_hashes); });
  return {std::move(keys.group_ids), std::move(keys.content_hashes), std::move(keys.page_offsets)};
}

// A method of Scheduler that takes keys, as one that takes their columns.
template <void (Scheduler::*Method)(const Scheduler::PrefixKeys&)>
void WithKeys(GuardedScheduler& self, std::vector<std::string> group_ids, std::vector<std::string> content_hashes,
              std::vector<int32_t> page_offsets) {
  const Scheduler::PrefixKeys keys{.group_ids = std::move(group_ids),
                                   .content_hashes = std::move(content_hashes),
                                   .page_offsets = std::move(page_offsets)};
  self.Use([&](Scheduler& scheduler) { (scheduler.*Method)(keys); });
}

int32_t TokenSize(GuardedScheduler& self, const py::str& request_id) {
  const std::string id = Utf8(request_id);
  return self.Use([&](Scheduler& scheduler) { return scheduler.RequestTokenSize(id); });
}

using SchedulerClass = py::class_<GuardedScheduler>;

void BindSteps(SchedulerClass& scheduler) {
  scheduler.def(py::init<SchedulerConfig>(), py::arg("config"))
      .def("submit_requests", Guarded(&Scheduler::SubmitRequests), py::arg("request_specs"))
      .def("set_weight_version", &SetWeightVersion, py::arg("weight_version"))
      .def("next_execution_plan", &NextPlan)
      .def("advance", Guarded(&Scheduler::Advance), py::arg("event"))
      .def("advance_rows", &AdvanceRows, py::arg("slots").noconvert(),
           py::arg("token_counts").noconvert(), py::arg("tokens").noconvert(), py::arg("round_number") = kAnyRound)
      .def("finish_rows", &FinishRows, py::arg("slots").noconvert())
      .def("block_table_views", &BlockTableArrays,
           "Per group: int32 [request-pool slots + 1, columns], the tables of all resident requests, kept up to date in "
           "place by every plan. Ask again after each plan: a grid that had to grow is another array.")
      .def("drain_kv_events", Guarded(&Scheduler::DrainResidencyEvents))
      .def("dropped_kv_events", Guarded(&Scheduler::DroppedResidencyEvents));
}

void BindGauges(SchedulerClass& scheduler) {
  scheduler.def("waiting_size", Guarded(&Scheduler::WaitingSize))
      .def("prefilling_size", Guarded(&Scheduler::PrefillingSize))
      .def("decoding_size", Guarded(&Scheduler::DecodingSize))
      .def("num_retractions", Guarded(&Scheduler::NumRetractions))
      .def("num_checkpoint_lost_tokens", Guarded(&Scheduler::NumCheckpointLostTokens))
      .def("empty_lcm_blocks", Guarded(&Scheduler::EmptyLcmBlocks))
      .def("active_lcm_blocks", Guarded(&Scheduler::ActiveLcmBlocks))
      .def("available_lcm_blocks", Guarded(&Scheduler::AvailableLcmBlocks))
      .def("lcm_block_uses", &LcmBlockUses)
      .def("host_cached_blocks", Guarded(&Scheduler::HostCachedBlocks))
      .def("host_pinned_blocks", Guarded(&Scheduler::HostPinnedBlocks))
      .def("host_empty_lcm_blocks", Guarded(&Scheduler::HostEmptyLcmBlocks))
      .def("num_dropped_stores", Guarded(&Scheduler::NumDroppedStores))
      .def("request_token_size", &TokenSize, py::arg("request_id"))
      .def("max_single_request_tokens", Guarded(&Scheduler::MaxSingleRequestTokens))
      .def("cache_group_total_pages", Guarded(&Scheduler::GroupTotalPages), py::arg("group_id"))
      .def("cache_group_available_pages", Guarded(&Scheduler::GroupAvailablePages), py::arg("group_id"))
      .def("cache_group_hit_tokens", Guarded(&Scheduler::GroupHitTokens), py::arg("group_id"));
}

void BindCacheControl(SchedulerClass& scheduler) {
  scheduler
      .def("clear_l1_cache", Guarded(&Scheduler::ClearDeviceCache))
      .def("clear_cache", Guarded(&Scheduler::ClearCache))
      .def("can_clear_cache", Guarded(&Scheduler::CanClearCache))
      .def("prefix_hashes_for_tokens", &HashTokens, py::arg("tokens"), py::arg("cache_salt") = "")
      .def("expand_prefix_keys", &ExpandKeys, py::arg("content_hashes"))
      .def("register_storage_keys", &WithKeys<&Scheduler::RegisterStorageKeys>, py::arg("group_ids"),
           py::arg("content_hashes"), py::arg("page_offsets"))
      .def("unregister_storage_keys", &WithKeys<&Scheduler::UnregisterStorageKeys>, py::arg("group_ids"),
           py::arg("content_hashes"), py::arg("page_offsets"))
      .def("waiting_prefix_hashes", Guarded(&Scheduler::WaitingPrefixHashes));
}

void BindPeerGauges(SchedulerClass& scheduler) {
  scheduler.def("bootstrapping_size", Guarded(&Scheduler::BootstrappingSize))
      .def("remote_prefilling_size", Guarded(&Scheduler::RemotePrefillingSize))
      .def("pd_transfer_size", Guarded(&Scheduler::PdTransferSize))
      .def("pd_transfer_pinned", Guarded(&Scheduler::PdTransferPinned), py::arg("request_id"));
}

}  // namespace

void BindScheduler(py::module_& module) {
  py::class_<RequestSpec>(module, "RequestSpec", "What a caller submits.")
      .def(py::init<>())
      .def_property("request_id", TextGetter(&RequestSpec::request_id), TextSetter(&RequestSpec::request_id))
      .def_property(
          "tokens", [](const RequestSpec& spec) { return spec.tokens; },
          [](RequestSpec& spec, const py::object& tokens) { spec.tokens = TokensOf(tokens); })
      .def_readwrite("max_new_tokens", &RequestSpec::max_new_tokens)
      .def_readwrite("priority", &RequestSpec::priority)
      .def_property("cache_salt", TextGetter(&RequestSpec::cache_salt), TextSetter(&RequestSpec::cache_salt))
      .def_property("fork_of", TextGetter(&RequestSpec::fork_of), TextSetter(&RequestSpec::fork_of))
      .def_readwrite("reads_prefix_cache", &RequestSpec::reads_prefix_cache);
  SchedulerClass scheduler(module, "Scheduler",
                           "Decides, round by round, which requests run and where they are cached.");
  BindSteps(scheduler);
  BindGauges(scheduler);
  BindCacheControl(scheduler);
  BindPeerGauges(scheduler);
}

}  // namespace tokenspeed
