#include "scheduler/request.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/check.h"
#include "scheduler/residency_ledger.h"

namespace tokenspeed {

RequestResources::RequestResources(CacheCoordinator& coordinator, ResidentTables& written, RequestSlot slot,
                                   std::vector<BlockTable> tables)
    : coordinator_(coordinator),
      written_(written),
      slot_(std::move(slot)),
      tables_(std::move(tables)),
      written_frontiers_(tables_.size(), 0),
      written_published_(tables_.size(), 0) {
  WriteTables(std::nullopt);
}

RequestResources::~RequestResources() {
  written_.Clear(slot_.index());
  coordinator_.Free(tables_);
}

void RequestResources::WriteTables(const std::optional<CompletedPages>& completed) {
  std::vector<int32_t> ids;
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    const BlockTable& table = tables_[group];
    const CacheGroup& cache = coordinator_.group(static_cast<int32_t>(group));
    const std::span<const int32_t> row = written_.Row(group, slot_.index());
    const auto written = static_cast<int32_t>(row.size());
    const int32_t frontier = table.reclaimed_prefix_blocks;
    written_.Erase(group, slot_.index(), static_cast<std::size_t>(written_frontiers_[group]),
                   static_cast<std::size_t>(std::min(frontier, written)));
    written_frontiers_[group] = frontier;
    int32_t first = written;
    if (completed.has_value()) {
      // Publishing may have put another block into a slot that it was offered. What is reserved behind the completed
      // pages, perhaps much, is not worth fetching.
      const auto num_pages = static_cast<int32_t>(completed->prefix_hashes.size());
      const int32_t end = std::min(written, num_pages * cache.geometry().BlocksPerPrefixPage());
      int32_t slot = std::max(frontier, cache.FirstSlotToPublish(*completed, written_published_[group]));
      while (slot < end && row[static_cast<std::size_t>(slot)] == cache.allocator().SlotId(table, slot)) ++slot;
      if (slot < end) first = slot;
    }
    written_published_[group] = table.published_blocks;
    ids.clear();
    for (int32_t slot = first; slot < table.NumSlots(); ++slot) ids.push_back(cache.allocator().SlotId(table, slot));
    written_.Write(group, slot_.index(), static_cast<std::size_t>(first), ids);
#ifndef NDEBUG
    const std::span<const int32_t> now = written_.Row(group, slot_.index());
    TOKENSPEED_CHECK(std::ranges::equal(now, cache.allocator().BlockIds(table)), "a table is written wrongly");
#endif
  }
}

namespace {

template <typename T>
void PrefetchAll(const T& object) {
  constexpr std::size_t kCacheLineBytes = 64;
  for (std::size_t byte = 0; byte < sizeof(T); byte += kCacheLineBytes) {
    __builtin_prefetch(reinterpret_cast<const char*>(&object) + byte);
  }
}

}  // namespace

void RequestResources::Prefetch() const { PrefetchAll(*this); }

void RequestResources::PrefetchTables() const {
  for (const BlockTable& table : tables_) __builtin_prefetch(&table);
}

void Request::Prefetch() const { PrefetchAll(*this); }

Request::Request(RequestSpec spec, const std::string& weight_version, int64_t sequence, SchedulerConfig::Role role,
                 const Request* parent)
    : id_(std::move(spec.request_id)),
      role_(role),
      origin_(parent == nullptr ? std::nullopt
                                : std::optional(ForkOrigin{.parent_id = parent->id(),
                                                           .parent_sequence = parent->rank().sequence})),
      rank_{.priority = spec.priority, .sequence = sequence},
      tokens_(std::move(spec.tokens)),
      submitted_size_(static_cast<int32_t>(tokens_.size())),
      prefill_size_(submitted_size_),
      max_new_tokens_(spec.max_new_tokens),
      state_(role == SchedulerConfig::Role::kFused ? RequestState::kSubmitted : RequestState::kBootstrapping),
      reads_prefix_cache_(spec.reads_prefix_cache),
      chain_keys_(ChainKeys(spec.cache_salt, weight_version)) {}

GenerationBudget Request::Budget() const {
  return GenerationBudget{.max_new_tokens = max_new_tokens_,
                          .generated = TokenSize() - submitted_size_,
                          .generated_at_admission = prefill_size_ - submitted_size_,
                          .retractions = retractions_};
}

bool Request::IsDeclaredOutputOut() const {
  if (max_new_tokens_ == 0 || resources_ == nullptr) return false;
  const int64_t out = std::ranges::count_if(resources_->rows_out, [](const RowOut& row) { return row.most_tokens > 0; });
  return out > 0 && TokenSize() - submitted_size_ + out >= max_new_tokens_;
}

int32_t Request::NumComputedTokens() const {
  return state_ == RequestState::kDecoding ? NumFedTokens() : window_.end();
}

std::span<const PrefixHash> Request::PrefixHashes(int32_t prefix_granularity, int32_t num_pages) {
  ExtendPrefixHashes(tokens_, prefix_granularity, num_pages, prefix_hashes_, chain_keys_);
  return {prefix_hashes_.data(), static_cast<std::size_t>(num_pages)};
}

PrefixHash Request::HashBefore(int32_t prefix_granularity, int32_t begin) {
  return begin == 0 ? HashPrefixPage({}, std::nullopt, chain_keys_)
                    : PrefixHashes(prefix_granularity, begin / prefix_granularity).back();
}

std::span<const uint64_t> Request::EventHashes(int32_t prefix_granularity, int32_t num_pages) {
  const auto width = static_cast<std::size_t>(prefix_granularity);
  while (event_hashes_.size() < static_cast<std::size_t>(num_pages)) {
    const std::span<const int32_t> all = tokens_;
    const auto page = all.subspan(event_hashes_.size() * width, width);
    const auto parent = event_hashes_.empty() ? ResidencyChainStart(chain_keys_) : event_hashes_.back();
    event_hashes_.push_back(HashResidencyPage(page, parent));
  }
  return {event_hashes_.data(), static_cast<std::size_t>(num_pages)};
}

void Request::ShareHashes(const Request& parent, int32_t prefix_granularity) {
  const auto in_prompt = static_cast<std::size_t>(submitted_size_ / prefix_granularity);
  const auto take_over = [in_prompt](auto& own, const auto& theirs) {
    const std::size_t end = std::min(in_prompt, theirs.size());
    if (own.size() < end) own.insert(own.end(), theirs.begin() + own.size(), theirs.begin() + end);
  };
  take_over(prefix_hashes_, parent.prefix_hashes_);
  take_over(event_hashes_, parent.event_hashes_);
}

void Request::EnterWindow(const PrefillWindow& window) {
  window_ = window;
  const bool completes = window.end() == prefill_size_;
  if (completes) overtaken_rounds = 0;
  has_completed_prompt_ = has_completed_prompt_ || completes;
  if (!completes) {
    state_ = RequestState::kPrefilling;
  } else if (role_ == SchedulerConfig::Role::kPrefill) {
    state_ = RequestState::kPrefillAwaitingResult;
  } else {
    state_ = RequestState::kPrefillDone;
  }
}

void Request::Bootstrap() {
  TOKENSPEED_CHECK(state_ == RequestState::kBootstrapping, "a handshake ends once");
  state_ = RequestState::kSubmitted;
}

void Request::StartRemotePrefill(std::unique_ptr<RequestResources> resources, PrefillWindow window,
                                 int32_t next_reserve) {
  TOKENSPEED_CHECK(state_ == RequestState::kSubmitted && window.end() == prefill_size_,
                   "the peer computes a prompt to its end");
  resources_ = std::move(resources);
  watched_pages.reset();
  next_reserve_ = next_reserve;
  window_ = window;
  overtaken_rounds = 0;
  state_ = RequestState::kRemotePrefilling;
}

void Request::FinishRemotePrefill(int32_t bootstrap_token) {
  TOKENSPEED_CHECK(state_ == RequestState::kRemotePrefilling, "only what the peer computes can come from there");
  tokens_.push_back(bootstrap_token);
  state_ = RequestState::kPrefillDone;
}

void Request::StartPrefill(std::unique_ptr<RequestResources> resources, PrefillWindow window, int32_t next_reserve) {
  TOKENSPEED_CHECK(IsWaiting() && window.end() <= prefill_size_, "prefill starts from a waiting state");
  resources_ = std::move(resources);
  watched_pages.reset();
  yields_ = false;
  next_reserve_ = next_reserve;
  EnterWindow(window);
}

void Request::ContinuePrefill(PrefillWindow window, int32_t next_reserve) {
  const bool continues = window.begin == window_.end() && window.end() <= prefill_size_;
  TOKENSPEED_CHECK(state_ == RequestState::kPrefilling && continues, "a chunk continues where the last one ended");
  next_reserve_ = next_reserve;
  EnterWindow(window);
}

void Request::StartDecode(int32_t next_reserve) {
  TOKENSPEED_CHECK(state_ == RequestState::kPrefillDone || state_ == RequestState::kDecoding,
                   "decoding follows a complete prefill");
  next_reserve_ = next_reserve;
  state_ = RequestState::kDecoding;
}

void Request::Land(std::span<const int32_t> tokens, int64_t round) {
  TOKENSPEED_CHECK(IsResident(), "a result lands on a scheduled request");
  RowsOut& rows = resources_->rows_out;
  const auto row = RowOfResult(rows, static_cast<int64_t>(tokens.size()), round);
  TOKENSPEED_CHECK(row.has_value(), "a result lands on a row that is out");
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  rows.erase(rows.begin() + static_cast<std::ptrdiff_t>(*row));
}

void Request::Force(std::span<const int32_t> tokens) {
  const auto draws = [](const RowOut& row) { return row.most_tokens > 0; };
  TOKENSPEED_CHECK(std::ranges::none_of(resources_->rows_out, draws), "a row was planned without the forced tokens");
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  unfed_tokens_ = 1 + static_cast<int32_t>(tokens.size());
}

void Request::LandBootstrapToken(std::span<const int32_t> tokens, int64_t round,
                                 std::vector<int32_t> draft_candidates) {
  TOKENSPEED_CHECK(state_ == RequestState::kPrefillAwaitingResult && !tokens.empty(), "nobody waits for this token");
  Land(tokens, round);
  draft_candidates_ = std::move(draft_candidates);
  state_ = RequestState::kPrefillDone;
}

void Request::Retract(bool made_way, bool has_recoverable_snapshot, int64_t retraction) {
  TOKENSPEED_CHECK(IsResident(), "only a resident request can be retracted");
  yields_ = made_way && state_ == RequestState::kPrefilling;
  decode_blocked = false;
  resources_.reset();
  draft_candidates_.clear();
  prefill_size_ = TokenSize();
  unfed_tokens_ = 0;
  if (made_way) ++retractions_;
  has_recoverable_snapshot_ = has_recoverable_snapshot;
  retraction_ = retraction;
  state_ = RequestState::kRetracted;
}

void Request::Finish() {
  resources_.reset();
  watched_pages.reset();
  state_ = RequestState::kFinished;
}

}  // namespace tokenspeed
