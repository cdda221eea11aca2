#include "scheduler/request.h"

#include <optional>
#include <utility>

#include "core/check.h"
#include "scheduler/residency_ledger.h"

namespace tokenspeed {

RequestResources::RequestResources(CacheCoordinator& coordinator, RequestSlot slot, std::vector<BlockTable> tables)
    : coordinator_(coordinator), slot_(std::move(slot)), tables_(std::move(tables)), ids_(tables_.size()) {
  RefreshIds();
}

RequestResources::~RequestResources() { coordinator_.Free(tables_); }

void RequestResources::RefreshIds() {
  for (std::size_t group = 0; group < tables_.size(); ++group) {
    ids_[group].resize(static_cast<std::size_t>(tables_[group].NumSlots()));
    coordinator_.WriteBlockIds(static_cast<int32_t>(group), tables_[group], ids_[group]);
  }
}

Request::Request(RequestSpec spec, const std::string& weight_version, int64_t sequence)
    : id_(std::move(spec.request_id)),
      rank_{.priority = spec.priority, .sequence = sequence},
      tokens_(std::move(spec.tokens)),
      submitted_size_(static_cast<int32_t>(tokens_.size())),
      prefill_size_(submitted_size_),
      max_new_tokens_(spec.max_new_tokens),
      chain_keys_(ChainKeys(spec.cache_salt, weight_version)) {}

GenerationBudget Request::Budget() const {
  return GenerationBudget{.max_new_tokens = max_new_tokens_,
                          .generated = TokenSize() - submitted_size_,
                          .generated_at_admission = prefill_size_ - submitted_size_,
                          .retractions = retractions_};
}

int32_t Request::NumComputedTokens() const {
  // The last token of a decoding request is fed by its next step.
  return state_ == RequestState::kDecoding ? TokenSize() - 1 : window_.end();
}

std::span<const PrefixHash> Request::PrefixHashes(int32_t prefix_granularity, int32_t num_pages) {
  ExtendPrefixHashes(tokens_, prefix_granularity, num_pages, prefix_hashes_, chain_keys_);
  return {prefix_hashes_.data(), static_cast<std::size_t>(num_pages)};
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

void Request::EnterWindow(const PrefillWindow& window) {
  window_ = window;
  const bool completes = window.end() == prefill_size_;
  if (completes) overtaken_rounds = 0;
  state_ = completes ? RequestState::kPrefillDone : RequestState::kPrefilling;
}

void Request::StartPrefill(std::unique_ptr<RequestResources> resources, PrefillWindow window, int32_t next_reserve) {
  TOKENSPEED_CHECK(IsWaiting() && window.end() <= prefill_size_, "prefill starts from a waiting state");
  resources_ = std::move(resources);
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

void Request::Retract(bool made_way) {
  TOKENSPEED_CHECK(IsResident(), "only a resident request can be retracted");
  yields_ = made_way && state_ == RequestState::kPrefilling;
  decode_blocked = false;
  resources_.reset();
  prefill_size_ = TokenSize();
  if (made_way) ++retractions_;
  state_ = RequestState::kRetracted;
}

void Request::Finish() {
  resources_.reset();
  state_ = RequestState::kFinished;
}

}  // namespace tokenspeed
