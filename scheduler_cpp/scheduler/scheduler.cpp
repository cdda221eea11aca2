#include "scheduler/scheduler.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <variant>

#include "scheduler/event_rules.h"
#include "scheduler/identifier.h"

namespace tokenspeed {
namespace {

SchedulerConfig Checked(SchedulerConfig config) {
  config.Validate();
  return config;
}

std::vector<std::string> GroupIds(const SchedulerConfig& config) {
  std::vector<std::string> ids;
  for (const CacheGroupConfig& group : config.cache_groups) ids.push_back(group.group_id);
  return ids;
}

CacheGroupKind KindOf(const CacheGroupConfig& group) {
  if (group.IsState()) return CacheGroupKind::kRecurrentState;
  return group.IsSliding() ? CacheGroupKind::kSlidingWindow : CacheGroupKind::kFullAttention;
}

std::vector<CacheGroupSpec> GroupSpecs(const SchedulerConfig& config) {
  std::vector<CacheGroupSpec> specs;
  for (const CacheGroupConfig& group : config.cache_groups) {
    specs.push_back(CacheGroupSpec{
        .kind = KindOf(group),
        .block_granularity = group.block_granularity,
        .cache_blocks_per_lcm_block = group.cache_blocks_per_lcm_block,
        .shard_count = group.shard_count,
        .sliding_window_tokens = group.IsSliding() ? *group.sliding_window_tokens : 0,
        .replayable = group.replayable});
  }
  return specs;
}

HostTier HostTierOf(const SchedulerConfig& config) {
  if (!config.HasHostCache()) return {};
  return HostTier{.num_lcm_blocks = config.num_host_pages - 1,
                  .streams = config.StreamsDeviceCacheToHost(),
                  .has_storage = config.enable_l3_storage};
}

DeviceMutationSink SinkFor(std::optional<ResidencyLedger>& ledger) {
  if (!ledger.has_value()) return nullptr;
  return [&ledger](const CacheKey& key, DeviceMutation) { ledger->Mark(key.content_hash); };
}

std::string EventNumber(std::size_t index, std::size_t count) {
  return " (event " + std::to_string(index) + " of a batch of " + std::to_string(count) + ")";
}

}  // namespace

Scheduler::Scheduler(SchedulerConfig config)
    : config_(Checked(std::move(config))),
      group_ids_(std::make_shared<const std::vector<std::string>>(GroupIds(config_))),
      max_single_request_tokens_(CapacityModel(config_).MaxSingleRequestTokens(config_.num_device_pages - 1)),
      ledger_(config_.enable_kv_cache_events ? std::make_optional<ResidencyLedger>(config_.max_kv_events)
                                             : std::nullopt),
      coordinator_(config_.prefix_granularity, config_.num_device_pages - 1, GroupSpecs(config_), SinkFor(ledger_),
                   HostTierOf(config_)),
      transfers_(coordinator_),
      slots_(config_.max_batch_size),
      resident_tables_(config_.cache_groups.size(), config_.max_batch_size),
      book_(config_.role),
      admission_(config_, coordinator_, transfers_, slots_, resident_tables_, book_,
                 ledger_.has_value() ? &*ledger_ : nullptr) {}

void Scheduler::ValidateSpecs(std::span<const RequestSpec> specs) const {
  std::unordered_map<std::string_view, const RequestSpec*> earlier;
  for (std::size_t index = 0; index < specs.size(); ++index) {
    const RequestSpec& spec = specs[index];
    const std::string entry = "request_specs entry " + std::to_string(index);
    ValidateId(entry + ": request_id", spec.request_id);
    const std::string who = entry + " (request '" + spec.request_id + "'): ";
    if (spec.tokens.empty()) throw std::invalid_argument(who + "tokens must not be empty");
    if (book_.Contains(spec.request_id)) throw std::invalid_argument(who + "request_id is already in use");
    if (earlier.contains(spec.request_id)) throw std::invalid_argument(who + "request_id occurs twice");
    if (spec.max_new_tokens < 0) {
      throw std::invalid_argument(who + "max_new_tokens must be >= 0, got " + std::to_string(spec.max_new_tokens));
    }
    ValidateChainKey(who + "cache_salt", spec.cache_salt);
    if (!spec.reads_prefix_cache && config_.role != SchedulerConfig::Role::kFused) {
      throw std::invalid_argument(who + "reads_prefix_cache False needs role Fused: of a peer's prompt not all is fed");
    }
    const auto prompt = static_cast<int64_t>(spec.tokens.size());
    // A prefill worker generates nothing: what it drafts goes into a slot that a lone prompt does without.
    const int64_t generated =
        config_.DecodesHere() ? std::max(spec.max_new_tokens, config_.decode_input_tokens) : 0;
    const int64_t limit = prompt + generated;
    if (limit > max_single_request_tokens_) {
      throw std::invalid_argument(who + "tokens (" + std::to_string(prompt) + ") and max_new_tokens (" +
                                  std::to_string(spec.max_new_tokens) + ") need room for " + std::to_string(limit) +
                                  " tokens; the device cache holds at most " +
                                  std::to_string(max_single_request_tokens_) + " of one request");
    }
    const auto named = earlier.find(spec.fork_of);
    if (!spec.fork_of.empty()) ValidateFork(spec, named == earlier.end() ? nullptr : named->second);
    earlier.emplace(spec.request_id, &spec);
  }
}

void Scheduler::SubmitRequests(std::vector<RequestSpec> specs) {
  ValidateSpecs(specs);
  for (RequestSpec& spec : specs) book_.Insert(std::move(spec), config_.weight_version);
}

void Scheduler::SetWeightVersion(std::string weight_version) {
  ValidateChainKey("weight_version", weight_version);
  config_.weight_version = std::move(weight_version);
}

void Scheduler::Advance(const ExecutionEvent& event) {
  EventRules rules(book_, late_results_, config_, max_single_request_tokens_);
  std::vector<Request*> targets;
  targets.reserve(event.events.size());
  for (std::size_t index = 0; index < event.events.size(); ++index) {
    try {
      targets.push_back(rules.Judge(event.events[index]));
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(error.what() + EventNumber(index, event.events.size()));
    } catch (const std::runtime_error& error) {
      throw std::runtime_error(error.what() + EventNumber(index, event.events.size()));
    }
  }
  for (std::size_t index = 0; index < targets.size(); ++index) {
    const SchedulerEvent& one = event.events[index];
    if (const auto* stored = std::get_if<WriteBackDoneEvent>(&one)) {
      transfers_.CompleteWriteBack(stored->op_id);
    } else if (const auto* loaded = std::get_if<LoadBackDoneEvent>(&one)) {
      CompleteLoadBack(*loaded);
    } else if (targets[index] != nullptr) {
      Apply(*targets[index], one);
    } else if (const auto* late = std::get_if<ExtendResultEvent>(&one)) {
      late_results_.Arrive(late->request_id, late->round_number);
    }
  }
}

void Scheduler::CompleteLoadBack(const LoadBackDoneEvent& event) {
  const std::vector<LoadPair> settled = transfers_.CompleteLoadBack(event.op_id, event.success);
  if (!ledger_.has_value()) return;
  for (const LoadPair& pair : settled) {
    if (pair.key) ledger_->StopWaiting(pair.key->content_hash);
  }
}

void Scheduler::Apply(Request& request, const SchedulerEvent& event) {
  std::visit(
      [&](const auto& typed) {
        using Event = std::decay_t<decltype(typed)>;
        if constexpr (std::is_same_v<Event, ExtendResultEvent>) {
          Land(request, typed.tokens, typed.round_number, typed.spec_candidate_ids);
          if (!typed.forced_tokens.empty()) request.Force(typed.forced_tokens);
        } else if constexpr (std::is_same_v<Event, UpdateReserveNumTokensEvent>) {
          request.SetNextReserve(typed.reserve_num_tokens_in_next_schedule_event);
        } else if constexpr (std::is_same_v<Event, RetractEvent>) {
          Retract(request, /*made_way=*/false);
        } else if constexpr (std::is_same_v<Event, FinishEvent>) {
          Finish(request);
        } else if constexpr (std::is_same_v<Event, BootstrappedEvent>) {
          book_.Move(request, [](Request& moved) { moved.Bootstrap(); });
        } else if constexpr (std::is_same_v<Event, RemotePrefillDoneEvent>) {
          book_.Move(request, [&](Request& moved) { moved.FinishRemotePrefill(typed.bootstrap_token); });
        } else {
          // Abort, PD failure and PD success; the rules let nothing else through.
          End(request);
        }
      },
      event);
}

void Scheduler::Land(Request& request, std::span<const int32_t> tokens, int64_t round,
                     std::vector<int32_t> draft_candidates) {
  if (request.state() != RequestState::kPrefillAwaitingResult || tokens.empty()) return request.Land(tokens, round);
  book_.Move(request, [&](Request& moved) { moved.LandBootstrapToken(tokens, round, std::move(draft_candidates)); });
}

void Scheduler::Finish(Request& request) {
  if (request.IsResident()) admission_.PublishAtFinish(request);
  End(request);
}

void Scheduler::End(Request& request) {
  if (request.IsResident()) late_results_.Expect(request);
  book_.Move(request, [](Request& moved) { moved.Finish(); });
}

void Scheduler::AdvanceRows(const RowResults& rows) {
  if (rows.round < kAnyRound || rows.round > round_number_) {
    throw std::invalid_argument("advance_rows: round_number must be in [0, " + std::to_string(round_number_) +
                                "], got " + std::to_string(rows.round));
  }
  const std::vector<Request*> requests = JudgeRows(book_, late_results_, rows);
  std::span<const int32_t> tokens = rows.tokens;
  for (std::size_t row = 0; row < requests.size(); ++row) {
    const auto count = static_cast<std::size_t>(rows.token_counts[row]);
    if (requests[row] != nullptr) Land(*requests[row], tokens.first(count), rows.round);
    tokens = tokens.subspan(count);
  }
  late_results_.CloseRound(rows.round);
}

void Scheduler::FinishRows(std::span<const int32_t> slots) {
  for (Request* request : JudgeFinishes(book_, slots)) Finish(*request);
}

std::vector<ResidencyEvent> Scheduler::DrainResidencyEvents() {
  return ledger_.has_value() ? ledger_->Drain(coordinator_) : std::vector<ResidencyEvent>{};
}

std::vector<std::pair<std::string, BlockTableView>> Scheduler::BlockTableViews() const {
  std::vector<std::pair<std::string, BlockTableView>> views;
  for (std::size_t group = 0; group < group_ids_->size(); ++group) {
    views.emplace_back((*group_ids_)[group], resident_tables_.View(group));
  }
  return views;
}

int32_t Scheduler::WaitingSize() const {
  return book_.Count(RequestState::kSubmitted) + book_.Count(RequestState::kRetracted);
}

int32_t Scheduler::PrefillingSize() const {
  return book_.Count(RequestState::kPrefilling) + book_.Count(RequestState::kRemotePrefilling) +
         book_.Count(RequestState::kPrefillAwaitingResult) + book_.Count(RequestState::kPrefillDone);
}

bool Scheduler::PdTransferPinned(const std::string& request_id) const {
  const Request* request = book_.Find(request_id);
  return request != nullptr && request->IsPdPinned();
}

int32_t Scheduler::DecodingSize() const { return book_.Count(RequestState::kDecoding); }

int32_t Scheduler::RequestTokenSize(const std::string& request_id) const {
  const Request* request = book_.Find(request_id);
  return request == nullptr ? -1 : request->TokenSize();
}

std::size_t Scheduler::GroupIndex(const std::string& group_id) const {
  const auto found = std::find(group_ids_->begin(), group_ids_->end(), group_id);
  if (found == group_ids_->end()) throw std::out_of_range("unknown cache group '" + group_id + "'");
  return static_cast<std::size_t>(found - group_ids_->begin());
}

int32_t Scheduler::GroupTotalPages(const std::string& group_id) const {
  return config_.cache_groups[GroupIndex(group_id)].total_pages;
}

int64_t Scheduler::GroupAvailablePages(const std::string& group_id) const {
  return coordinator_.NumAvailableBlocks(static_cast<int32_t>(GroupIndex(group_id)));
}

int64_t Scheduler::GroupHitTokens(const std::string& group_id) const {
  return admission_.num_hit_tokens(GroupIndex(group_id));
}

std::vector<std::string> Scheduler::PrefixHashesForTokens(std::span<const int32_t> tokens,
                                                          const std::string& cache_salt) const {
  ValidateChainKey("cache_salt", cache_salt);
  if (tokens.size() > static_cast<std::size_t>(std::numeric_limits<int32_t>::max())) {
    throw std::invalid_argument("tokens: at most " + std::to_string(std::numeric_limits<int32_t>::max()) +
                                " can be hashed, got " + std::to_string(tokens.size()));
  }
  const auto count = static_cast<int32_t>(tokens.size());
  std::vector<PrefixHash> hashes;
  ExtendPrefixHashes(tokens, config_.prefix_granularity, std::max(count - 1, 0) / config_.prefix_granularity, hashes,
                     ChainKeys(cache_salt, config_.weight_version));
  std::vector<std::string> texts;
  texts.reserve(hashes.size());
  for (const PrefixHash& hash : hashes) texts.push_back(hash.ToHex());
  return texts;
}

Scheduler::PrefixKeys Scheduler::ExpandPrefixKeys(std::span<const std::string> content_hashes) const {
  int64_t keys_per_page = 0;
  for (const CacheGroupConfig& group : config_.cache_groups) {
    keys_per_page += config_.prefix_granularity / group.block_granularity;
  }
  if (static_cast<int64_t>(content_hashes.size()) > kMaxPrefixKeys / keys_per_page) {
    throw std::invalid_argument("content_hashes: " + std::to_string(content_hashes.size()) + " pages of " +
                                std::to_string(keys_per_page) + " block keys are more than " +
                                std::to_string(kMaxPrefixKeys) + " keys");
  }
  PrefixKeys keys;
  for (const CacheGroupConfig& group : config_.cache_groups) {
    const int32_t blocks_per_page = config_.prefix_granularity / group.block_granularity;
    for (const std::string& hash : content_hashes) {
      for (int32_t offset = 0; offset < blocks_per_page; ++offset) {
        keys.group_ids.push_back(group.group_id);
        keys.content_hashes.push_back(hash);
        keys.page_offsets.push_back(offset);
      }
    }
  }
  return keys;
}

}  // namespace tokenspeed
