// Objects made by `Class.__new__(Class)` alone have no C++ object behind them. pybind11 would allocate one without
// constructing it as soon as a function takes it; here that allocation is refused.

#include <cstddef>

#include "bindings/bindings.h"

namespace py = pybind11;

namespace tokenspeed {
namespace {

void* RefuseToAllocate(std::size_t) { throw py::type_error("the object was made without calling its class"); }

}  // namespace

void RefuseBareObjects(const py::object& scope) {
  for (const auto& [name, member] : scope.attr("__dict__").attr("copy")().cast<py::dict>()) {
    if (py::isinstance<py::module_>(member)) {
      RefuseBareObjects(py::reinterpret_borrow<py::object>(member));
    } else if (PyType_Check(member.ptr()) != 0) {
      auto* type = py::detail::get_type_info(reinterpret_cast<PyTypeObject*>(member.ptr()));
      if (type != nullptr) type->operator_new = &RefuseToAllocate;
    }
  }
}

}  // namespace tokenspeed
