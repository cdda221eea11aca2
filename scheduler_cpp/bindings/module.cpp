#include "bindings/bindings.h"

PYBIND11_MODULE(_scheduler, module) {
  module.doc() = "Scheduler core: admission, prefix reuse, block tables, retraction and plan construction.";
  tokenspeed::BindConfig(module);
  tokenspeed::BindEvents(module);
  tokenspeed::BindPlan(module);
  tokenspeed::BindScheduler(module);
  tokenspeed::RefuseBareObjects(module);
}
