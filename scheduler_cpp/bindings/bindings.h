// The parts of the Python module `tokenspeed_jax._scheduler`. This folder alone includes Python.
//
// Containers convert by value, so every read of an attribute makes a fresh list or dict. The `*_array` and `*_arrays`
// methods return read-only NumPy views of the C++ storage, whose base object keeps that storage alive.

#ifndef TOKENSPEED_BINDINGS_BINDINGS_H_
#define TOKENSPEED_BINDINGS_BINDINGS_H_

#include <pybind11/pybind11.h>

namespace tokenspeed {

void BindConfig(pybind11::module_& module);
void BindEvents(pybind11::module_& module);
void BindPlan(pybind11::module_& module);
void BindScheduler(pybind11::module_& module);

}  // namespace tokenspeed

#endif  // TOKENSPEED_BINDINGS_BINDINGS_H_
