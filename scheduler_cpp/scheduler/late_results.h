// LateResults: rows whose requests have ended before their results came in. The results are still to come, and must not
// be taken for those of whoever has the same id or slot by then.
//
// Invariants:
// - A row is expected from the end of its request until its result arrives, or until all results of its round are in.
// - Every row gets one result, and those of one id come in the order of its rows, whichever requests they were planned
//   for. So a result that names no round belongs to the oldest row expected under its id, before any of a live request.
// - At most kMostExpected rows are expected; beyond that the rows of the oldest round are written off. Only a caller
//   that ends requests again and again and never delivers what is out gets there.
//
// Thread safety: none. Costs: O(1) for an id without such rows; else O(rows of the round, log rounds).

#ifndef TOKENSPEED_SCHEDULER_LATE_RESULTS_H_
#define TOKENSPEED_SCHEDULER_LATE_RESULTS_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "scheduler/request.h"

namespace tokenspeed {

class LateResults {
 public:
  static constexpr std::size_t kMostExpected = 1 << 14;

  // The resident request is about to end.
  void Expect(const Request& request);

  // Rounds of the rows expected under this id, oldest first.
  std::span<const int64_t> RoundsOf(const std::string& id) const;
  bool Expects(int32_t slot, int64_t round) const;
  std::size_t Count() const { return count_; }

  // A result of this id has arrived, of its oldest round for kAnyRound. One that nobody expects is ignored.
  void Arrive(const std::string& id, int64_t round);
  // Every result of the round has arrived, or never will.
  void CloseRound(int64_t round);

 private:
  struct Row {
    std::string id;
    int32_t slot = 0;
  };
  using Rounds = std::map<int64_t, std::vector<Row>>;

  void ForgetRound(const std::string& id, int64_t round);
  void Close(Rounds::iterator round);

  Rounds rounds_;
  std::unordered_map<std::string, std::vector<int64_t>> rounds_by_id_;
  std::size_t count_ = 0;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_LATE_RESULTS_H_
