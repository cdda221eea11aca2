// SimulatedDevice: remembers what was written where, so that a wrong block table shows up as a wrong read.
//
// Every row of a history group holds the fingerprint of the token prefix, salt and weights that it was computed from; a
// block of a state group holds the one of everything that its snapshot summarises. Steps run in the order of their
// plans, as a device stream does, and sampled tokens stay here until they are landed. A read that does not find what
// this very request's prefix gives ends the program.
//
// Thread safety: none.

#ifndef TOKENSPEED_TESTS_SIMULATED_DEVICE_H_
#define TOKENSPEED_TESTS_SIMULATED_DEVICE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "scheduler/execution_plan.h"
#include "scheduler/scheduler_config.h"
#include "tests/simulated_host.h"

namespace tokenspeed::testing {

// Prints and aborts unless `condition`, in every build; a fuzzer takes that for a finding.
void Require(bool condition, const char* claim);

class SimulatedDevice {
 public:
  // `accept` says how many tokens of a decode step are accepted, 1 to decode_input_tokens.
  SimulatedDevice(const SchedulerConfig& config, std::function<int32_t()> accept)
      : config_(config), accept_(std::move(accept)), host_(config_, contents_) {}
  SimulatedDevice(const SimulatedDevice&) = delete;
  SimulatedDevice& operator=(const SimulatedDevice&) = delete;

  struct Row {
    std::string id;
    int32_t slot = 0;
    bool is_decode = false;
    std::vector<int32_t> tokens;  // sampled; empty for a chunk that does not complete its prompt
  };

  // `identity` stands for the salt and the weights.
  void Submit(const std::string& id, std::vector<int32_t> tokens, uint64_t identity);
  // The executor forgets what it sampled beyond the first `num_tokens` tokens.
  void Forget(const std::string& id, std::size_t num_tokens) { requests_.at(id).tokens.resize(num_tokens); }
  // What is certain to follow the tokens that it has sampled.
  void Force(const std::string& id, const std::vector<int32_t>& tokens) {
    requests_.at(id).tokens.insert(requests_.at(id).tokens.end(), tokens.begin(), tokens.end());
  }
  void End(const std::string& id) { requests_.erase(id); }

  // Executes a plan; returns its rows in order. The plan's copies to and from the host are under way afterwards.
  std::vector<Row> Run(const ExecutionPlan& plan);
  SimulatedHost& host() { return host_; }
  const SimulatedHost& host() const { return host_; }

 private:
  struct Request {
    std::vector<int32_t> tokens;  // prompt and everything sampled, landed or not
    uint64_t identity = 0;
  };
  // Of one row of a batch: what it computes, and its table in each group.
  struct Step {
    int32_t begin = 0;  // first computed token, re-fed ones left aside
    int32_t end = 0;
    int32_t replay = 0;
    std::vector<std::span<const int32_t>> tables;
    std::vector<uint64_t> prints;  // prints[i]: of the first i + 1 tokens
  };

  Row RunPrefill(const ForwardBatch& batch, std::size_t row, std::size_t first_input);
  Row RunDecode(const ForwardBatch& batch, std::size_t row);
  std::vector<int32_t> Sample(Request& request, int32_t count) const;
  Step StepOf(const ForwardBatch& batch, std::size_t row, const Request& request) const;
  void ComputeHistory(std::size_t group, const Step& step);
  // `writes`: token count summarised by what is written to each slot, 0 = rubbish.
  void Scan(std::size_t group, const Step& step, const std::map<int32_t, int32_t>& writes);
  int32_t BlockAt(std::size_t group, const Step& step, int32_t slot) const;

  SchedulerConfig config_;
  std::function<int32_t()> accept_;
  std::map<std::string, Request> requests_;
  Contents contents_;
  SimulatedHost host_;
};

}  // namespace tokenspeed::testing

#endif  // TOKENSPEED_TESTS_SIMULATED_DEVICE_H_
