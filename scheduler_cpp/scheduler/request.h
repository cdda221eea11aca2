// Request: one prompt and its continuation, where it stands, and what it holds.
//
// Invariants:
// - A request holds resources exactly in the states that HoldsCache names; they move or die whole.
// - Tokens are only ever appended, so a prefix hash once computed stays valid for the request's whole life.
// - Every token that has been fed is covered by the request's tables: NumFedTokens() <= covered_tokens.
//
// Ownership: owns its resources. Thread safety: none.

#ifndef TOKENSPEED_SCHEDULER_REQUEST_H_
#define TOKENSPEED_SCHEDULER_REQUEST_H_

#include <algorithm>
#include <compare>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "coordinator/cache_coordinator.h"
#include "scheduler/cache_progress.h"
#include "scheduler/request_slot_pool.h"
#include "scheduler/request_spec.h"
#include "scheduler/request_state.h"
#include "scheduler/reserve.h"
#include "scheduler/resident_tables.h"
#include "scheduler/rows_out.h"

namespace tokenspeed {

// Everything a resident request holds. Dies with its slot and its blocks given back.
class RequestResources {
 public:
  RequestResources(CacheCoordinator& coordinator, ResidentTables& written, RequestSlot slot,
                   std::vector<BlockTable> tables);
  RequestResources(const RequestResources&) = delete;
  RequestResources& operator=(const RequestResources&) = delete;
  ~RequestResources();

  int32_t slot_index() const { return slot_.index(); }
  std::span<BlockTable> tables() { return tables_; }
  std::span<const BlockTable> tables() const { return tables_; }
  // To be called after every admission: writes what it changed in the tables into the resident ones. `completed` is what
  // was published with it, which may have put other blocks into slots that were already written.
  void WriteTables(const std::optional<CompletedPages>& completed);

  void Prefetch() const;
  void PrefetchTables() const;

  CacheProgress progress;
  RowsOut rows_out;
  int64_t covered_tokens = 0;  // tokens that admissions have made room for, reserves left aside

 private:
  CacheCoordinator& coordinator_;
  ResidentTables& written_;
  RequestSlot slot_;
  std::vector<BlockTable> tables_;
  std::vector<int32_t> written_frontiers_;  // per group, slots: reclaimed as far as it is written
  std::vector<int32_t> written_published_;  // per group, slots: offered to the prefix index when it was written
};

// The tokens of a prompt that one prefill computes.
struct PrefillWindow {
  int32_t begin = 0;
  int32_t size = 0;
  int32_t replay = 0;  // tokens before `begin` that are fed again

  int32_t end() const { return begin + size; }
};

// Who is served first: the lower priority, and among equals the earlier submission.
struct RequestRank {
  int32_t priority = 0;
  int64_t sequence = 0;

  friend auto operator<=>(const RequestRank&, const RequestRank&) = default;
};

// Which retracted request comes back first: of the most urgent those whose client already reads output, then the one
// that has waited longest.
struct ReadmissionRank {
  int32_t priority = 0;
  bool starts_generation = false;
  int64_t retraction = 0;

  friend auto operator<=>(const ReadmissionRank&, const ReadmissionRank&) = default;
};

// Whom a fork was submitted to follow. The sequence tells the parent from a later request of the same id.
struct ForkOrigin {
  std::string parent_id;
  int64_t parent_sequence = 0;
};

class Request {
 public:
  // `sequence` orders requests by submission. Together with the spec's salt, `weight_version` decides for the request's
  // whole life with whom it shares prefixes. `role` is the worker's, `parent` the request that the spec is a fork of, null
  // without one.
  Request(RequestSpec spec, const std::string& weight_version, int64_t sequence, SchedulerConfig::Role role,
          const Request* parent);

  const std::string& id() const { return id_; }
  int32_t priority() const { return rank_.priority; }
  const RequestRank& rank() const { return rank_; }
  RequestState state() const { return state_; }
  bool IsResident() const { return resources_ != nullptr; }
  bool IsWaiting() const { return state_ == RequestState::kSubmitted || state_ == RequestState::kRetracted; }
  bool IsPdPinned() const { return tokenspeed::IsPdPinned(role_, state_); }
  // Retracted, with a snapshot of its cache elsewhere: it is served before new prompts, not among them.
  bool IsReadmission() const { return state_ == RequestState::kRetracted && has_recoverable_snapshot_; }
  ReadmissionRank readmission_rank() const {
    return {.priority = rank_.priority, .starts_generation = TokenSize() == submitted_size_, .retraction = retraction_};
  }

  // Absent for a request that was not submitted as a fork.
  const std::optional<ForkOrigin>& origin() const { return origin_; }
  // Whether its prompt has ever been scheduled to its end.
  bool has_completed_prompt() const { return has_completed_prompt_; }
  // Whether every token of its prompt has still to be fed. Until it has been, not even its own blocks are taken back
  // after a retraction: others may have published more behind them.
  bool MustFeedWholePrompt() const { return !reads_prefix_cache_ && !has_completed_prompt_; }
  std::span<const int32_t> SubmittedTokens() const {
    return {tokens_.data(), static_cast<std::size_t>(submitted_size_)};
  }
  std::string CacheSalt() const { return chain_keys_.empty() ? std::string() : chain_keys_.front(); }
  // Whether a request of this salt and version would share prefixes with this one.
  bool SharesPrefixesUnder(const std::string& cache_salt, const std::string& weight_version) const {
    return chain_keys_ == ChainKeys(cache_salt, weight_version);
  }

  const std::vector<int32_t>& tokens() const { return tokens_; }
  int32_t TokenSize() const { return static_cast<int32_t>(tokens_.size()); }
  int32_t prefill_size() const { return prefill_size_; }
  // The tokens that prefill computes: the prompt, and after a retraction what had been generated by then.
  std::span<const int32_t> PrefillTokens() const { return {tokens_.data(), static_cast<std::size_t>(prefill_size_)}; }
  GenerationBudget Budget() const;
  // Whether results that have not landed complete the declared output; each brings at least one token.
  bool IsDeclaredOutputOut() const;

  RequestResources& resources() { return *resources_; }
  const RequestResources& resources() const { return *resources_; }
  // Request-pool slot of a resident request.
  std::optional<int32_t> SlotIndex() const {
    return resources_ == nullptr ? std::nullopt : std::optional(resources_->slot_index());
  }
  const PrefillWindow& window() const { return window_; }
  int32_t next_reserve() const { return next_reserve_; }
  // The token that follows the prompt, once it has landed.
  std::optional<int32_t> BootstrapToken() const {
    return TokenSize() > prefill_size_ ? std::optional(tokens_[static_cast<std::size_t>(prefill_size_)]) : std::nullopt;
  }
  // Role P: the first draft window, which landed with the bootstrap token.
  std::span<const int32_t> draft_candidates() const { return draft_candidates_; }
  // Output that came with forced tokens and that no row has fed: the last tokens, which rows take from here. 0 where the
  // next row feeds the token that was drawn last, which is on the device.
  int32_t unfed_tokens() const { return unfed_tokens_; }
  int32_t NumFedTokens() const { return TokenSize() - std::max(unfed_tokens_, 1); }
  // Leading tokens whose cache rows are written, or will be before any later reader runs.
  int32_t NumComputedTokens() const;

  // Hashes of the first `num_pages` prefix pages; each page is hashed once. The view lives until the next call.
  std::span<const PrefixHash> PrefixHashes(int32_t prefix_granularity, int32_t num_pages);
  // The hash behind which the prefix page that starts at the boundary `begin` is known: that of the page before, or, for
  // the first page, that of the chain keys over no tokens.
  PrefixHash HashBefore(int32_t prefix_granularity, int32_t begin);
  // Residency-event hashes of the first `num_pages` prefix pages, in the same manner.
  std::span<const uint64_t> EventHashes(int32_t prefix_granularity, int32_t num_pages);
  // Takes over what `parent`, of the same prompt and chain keys, has hashed of the prompt.
  void ShareHashes(const Request& parent, int32_t prefix_granularity);

  // Transitions. RequestBook keeps the order by state and is the only caller of those that change the state.
  void Bootstrap();
  // The peer computes `window`, which reaches the end of the prompt.
  void StartRemotePrefill(std::unique_ptr<RequestResources> resources, PrefillWindow window, int32_t next_reserve);
  void FinishRemotePrefill(int32_t bootstrap_token);
  void StartPrefill(std::unique_ptr<RequestResources> resources, PrefillWindow window, int32_t next_reserve);
  void ContinuePrefill(PrefillWindow window, int32_t next_reserve);
  void StartDecode(int32_t next_reserve);
  // `round` as in RowOfResult; that row is out no more.
  void Land(std::span<const int32_t> tokens, int64_t round);
  // Appends what is certain to follow the token that has just landed. No row may be out that draws.
  void Force(std::span<const int32_t> tokens);
  // The first `count` unfed tokens are in a row now.
  void Feed(int32_t count) { unfed_tokens_ -= count; }
  // The landing for which PrefillAwaitingResult waits.
  void LandBootstrapToken(std::span<const int32_t> tokens, int64_t round, std::vector<int32_t> draft_candidates);
  void SetNextReserve(int32_t num_tokens) { next_reserve_ = num_tokens; }
  // Frees everything; what has been generated so far becomes part of the prompt. `made_way` tells a retraction for
  // others' sake from one that the executor asked for. `retraction` numbers the retractions of all requests.
  void Retract(bool made_way, bool has_recoverable_snapshot, int64_t retraction);
  void Finish();

  // Hints to the processor that the request, or what it holds, is about to be used.
  void Prefetch() const;
  void PrefetchResources() const {
    if (resources_ != nullptr) resources_->Prefetch();
  }
  void PrefetchTables() const {
    if (resources_ != nullptr) resources_->PrefetchTables();
  }

  // Set when an unfinished prompt had to give way: it comes back only when no decode lacks storage and no other
  // prompt is unfinished. Otherwise it would take what they wait for, block on its next chunk, give way, and so on
  // for ever.
  bool yields() const { return yields_; }

  int64_t last_round = 0;  // number of the last round that scheduled the request
  // While it waits refused: what would have to be cached for it to need less.
  std::optional<PrefixWatch::Ticket> watched_pages;
  bool decode_blocked = false;  // its last decode step did not fit
  // Rounds in which it waited while one behind it was admitted, since its prompt was last complete. An unfinished
  // prompt that gives way keeps the count: it has not got what it waited for.
  int32_t overtaken_rounds = 0;

 private:
  // Moves on to `window` and to the state that its end means.
  void EnterWindow(const PrefillWindow& window);

  std::string id_;
  SchedulerConfig::Role role_;
  std::optional<ForkOrigin> origin_;
  RequestRank rank_;
  std::vector<int32_t> tokens_;
  int32_t submitted_size_;
  int32_t prefill_size_;
  int32_t max_new_tokens_;
  int32_t retractions_ = 0;
  RequestState state_;
  std::unique_ptr<RequestResources> resources_;
  PrefillWindow window_;
  int32_t next_reserve_ = 0;
  int32_t unfed_tokens_ = 0;
  std::vector<int32_t> draft_candidates_;
  bool yields_ = false;
  bool has_recoverable_snapshot_ = false;
  int64_t retraction_ = 0;
  bool has_completed_prompt_ = false;
  bool reads_prefix_cache_;
  std::vector<std::string> chain_keys_;
  std::vector<PrefixHash> prefix_hashes_;
  std::vector<uint64_t> event_hashes_;
};

}  // namespace tokenspeed

#endif  // TOKENSPEED_SCHEDULER_REQUEST_H_
