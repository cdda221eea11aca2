// Forks: requests with the prompt of another one, their parent, whose blocks they take over once it is computed.
//
// A fork waits for its parent's prompt, and meanwhile is in nobody's way. Then it is admitted behind the parent's rows,
// if the parent still holds them, and otherwise like any other request. Once admitted it has nothing to do with its
// parent any more.

#include <algorithm>
#include <stdexcept>
#include <string>

#include "scheduler/scheduler.h"

namespace tokenspeed {

void Scheduler::ValidateFork(const RequestSpec& fork, const RequestSpec* parent) const {
  const std::string who = "request '" + fork.request_id + "': fork_of '" + fork.fork_of + "' ";
  if (config_.role != SchedulerConfig::Role::kFused) {
    throw std::invalid_argument(who + "needs role Fused: a peer's transfer moves one request's blocks");
  }
  if (fork.fork_of == fork.request_id) throw std::invalid_argument(who + "must not be the request itself");
  const Request* live = parent == nullptr ? book_.Find(fork.fork_of) : nullptr;
  if (parent == nullptr && (live == nullptr || live->state() == RequestState::kFinished)) {
    throw std::invalid_argument(who + "is neither a live request nor an earlier one of this submission");
  }
  if (parent != nullptr ? !parent->fork_of.empty() : live->origin().has_value()) {
    throw std::invalid_argument(who + "is a fork itself; name the request that it is a fork of");
  }
  const std::span<const int32_t> tokens = parent != nullptr ? std::span(parent->tokens) : live->SubmittedTokens();
  const auto [differs, _] = std::mismatch(fork.tokens.begin(), fork.tokens.end(), tokens.begin(), tokens.end());
  if (fork.tokens.size() != tokens.size() || differs != fork.tokens.end()) {
    throw std::invalid_argument(who + "has other tokens: " + std::to_string(tokens.size()) + ", against " +
                                std::to_string(fork.tokens.size()) + ", of which the first " +
                                std::to_string(differs - fork.tokens.begin()) + " agree");
  }
  const bool same_chain = parent != nullptr ? parent->cache_salt == fork.cache_salt
                                            : live->SharesPrefixesUnder(fork.cache_salt, config_.weight_version);
  if (!same_chain) {
    throw std::invalid_argument(who + "has another cache_salt, or was submitted under another weight version");
  }
}

const Request* Scheduler::LiveParent(const Request& request) const {
  if (!request.origin().has_value() || request.state() != RequestState::kSubmitted) return nullptr;
  const Request* parent = book_.Find(request.origin()->parent_id);
  const bool lives = parent != nullptr && parent->rank().sequence == request.origin()->parent_sequence &&
                     parent->state() != RequestState::kFinished;
  return lives ? parent : nullptr;
}

bool Scheduler::AwaitsParent(const Request& request) const {
  const Request* parent = LiveParent(request);
  if (parent == nullptr) return false;
  // Copies run before the batch, so what this round computes comes too late for them.
  const bool completes_now = parent->state() == RequestState::kPrefillDone && parent->last_round == round_number_;
  return completes_now || !parent->has_completed_prompt();
}

AdmissionOutcome Scheduler::AdmitFirstChunk(Round& round, Request& request) {
  const Request* parent = LiveParent(request);
  // A parent that came back with output may have resumed so far behind the prompt that it holds the prompt's last
  // blocks without all of their rows.
  if (parent != nullptr && parent->prefill_size() == request.prefill_size() &&
      (parent->state() == RequestState::kPrefillDone || parent->state() == RequestState::kDecoding)) {
    const auto outcome = admission_.Fork(request, *parent, round.budget(), round.fresh(), round.copies());
    if (outcome.has_value()) return *outcome;
  }
  return admission_.Prefill(request, round.budget(), round.fresh(), round.copies());
}

}  // namespace tokenspeed
