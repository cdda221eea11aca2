// The parts of the Python module `tokenspeed_jax._scheduler`. This folder alone includes Python.
//
// Containers convert by value, so every read of an attribute makes a fresh list or dict. The `*_array` and `*_arrays`
// methods return read-only NumPy views of the C++ storage, whose base object keeps that storage alive.

#ifndef TOKENSPEED_BINDINGS_BINDINGS_H_
#define TOKENSPEED_BINDINGS_BINDINGS_H_

#include <pybind11/pybind11.h>

#include <cstddef>
#include <string>

namespace tokenspeed {

void BindConfig(pybind11::module_& module);
void BindEvents(pybind11::module_& module);
void BindPlan(pybind11::module_& module);
void BindScheduler(pybind11::module_& module);
// To be called last, with the module: covers the classes in it and its submodules.
void RefuseBareObjects(const pybind11::object& scope);

// The text as UTF-8. Raises UnicodeEncodeError, a ValueError, for text that has none (lone surrogates).
inline std::string Utf8(const pybind11::str& text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (bytes == nullptr) throw pybind11::error_already_set();
  return {bytes, static_cast<std::size_t>(size)};
}

// Accessors of a text attribute that takes str alone: bytes that are no UTF-8 could be set but never be read again.
template <typename Owner>
auto TextGetter(std::string Owner::*member) {
  return [member](const Owner& owner) { return pybind11::str(owner.*member); };
}

template <typename Owner>
auto TextSetter(std::string Owner::*member) {
  return [member](Owner& owner, const pybind11::str& text) { owner.*member = Utf8(text); };
}

}  // namespace tokenspeed

#endif  // TOKENSPEED_BINDINGS_BINDINGS_H_
