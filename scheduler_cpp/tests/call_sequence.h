// CallSequence: a scheduler driven through its C++ face by a string of bytes, by right and by wrong calls alike.
//
// The bytes choose the configuration, the requests (which share prefixes, ids and salts), when to plan, which results
// to land in which form and order, and what else happens: endings, retractions, clears, new weights, drains, wrong calls.
// A simulated device executes every plan. Checked all along:
// - what a step reads is what its own prefix gives (simulated_device.h);
// - a plan keeps the limits: rows, budget, slots, block ids, one truncated chunk at most, and that last (I7, I38 to
//   I41, I49, I55);
// - a refused call throws what its kind of mistake throws, and changes no gauge; a twin that gets the right calls only
//   plans the same ever after (I53, I54);
// - a result lands on its own row: the token size of a request is what the right results make it, and those of rows
//   whose request has ended change nothing;
// - what the host tier keeps and gives back is what it was given, however late its copies end (simulated_host.h);
// - residency events are consistent, and after a clear nothing is left published (I56);
// - in the end everybody finishes, and every block returns (I50).
//
// Failures end the program (Require), whichever build it is.

#ifndef TOKENSPEED_TESTS_CALL_SEQUENCE_H_
#define TOKENSPEED_TESTS_CALL_SEQUENCE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "scheduler/scheduler.h"
#include "tests/simulated_device.h"

namespace tokenspeed::testing {

// What a run has met; a test asks that the runs together meet everything.
struct CallCounts {
  int plans_with_rows = 0;
  int hits = 0;
  int retractions = 0;
  int late_results = 0;
  int refusals = 0;
  int dropped_events = 0;
  int finished = 0;
  int64_t blocks_loaded = 0;
  int clears_above_a_host = 0;
  int forced = 0;
};

class CallSequence {
 public:
  explicit CallSequence(std::span<const uint8_t> bytes);

  // Calls until the bytes are used up, then lets everybody finish.
  void Run();

  const CallCounts& counts() const { return counts_; }

 private:
  struct Request {
    int32_t incarnation = 0;
    int32_t token_size = 0;  // prompt and landed output
    int32_t stop_at = 0;     // token size at which it finishes
    bool was_forced = false;
  };
  // A row whose result has not been delivered.
  struct Out {
    int32_t incarnation = 0;
    int64_t round = 0;
    SimulatedDevice::Row row;
  };
  using Call = std::function<void(Scheduler&)>;

  int32_t Below(int32_t bound);
  SchedulerConfig ChooseConfig();
  void Step();

  // Right calls: both schedulers get them.
  void Both(const Call& call);
  void Submit();
  void Plan();
  void LandOne(bool ends);
  // Lands a row with tokens that follow without having been sampled, where one may bring some.
  void LandForced();
  void LandRound();
  void EndOne();
  void RetractOne();
  void Drain();
  void Clear();
  void ClearDevice();
  // Ends so many of the copies between device and host, oldest first.
  void EndCopies(std::size_t count);

  // Wrong calls (call_sequence_hostile.cpp): the twin is spared them.
  void Refused(const Call& call);
  void RefusedEvents(std::vector<SchedulerEvent> bad);
  void WrongEvent();
  void WrongRows();
  void WrongSubmission();
  void ResultsOfNobody();

  void CheckPlan(const ExecutionPlan& plan) const;
  void CheckTables(const ForwardBatch& batch) const;
  void CheckSame(const ExecutionPlan& plan, const ExecutionPlan& other) const;
  std::vector<int64_t> Gauges(const Scheduler& scheduler) const;

  bool TakesForcedTokens() const;
  bool IsLate(const std::string& id, const Out& out) const;
  // An id that is live, chosen by the bytes; empty when there is none.
  std::string AnyLive();
  // The events that land the oldest row of an id: its result, and what belongs to it.
  std::vector<SchedulerEvent> ResultOf(const std::string& id, bool names_round) const;
  // What the row's landing changes here.
  void NoteLanding(const std::string& id);
  void FinishIfDone(const std::string& id);
  void Forget(const std::string& id);
  void RunOut();

  std::span<const uint8_t> bytes_;
  SchedulerConfig config_;
  Scheduler scheduler_;
  Scheduler twin_;
  SimulatedDevice device_;
  std::map<std::string, Request> live_;
  std::map<std::string, std::deque<Out>> out_;  // by id, oldest first
  std::set<uint64_t> published_;
  std::string weight_version_;
  int32_t incarnations_ = 0;
  CallCounts counts_;
};

}  // namespace tokenspeed::testing

#endif  // TOKENSPEED_TESTS_CALL_SEQUENCE_H_
