#include "tests/call_sequence.h"

#include <algorithm>
#include <utility>

namespace tokenspeed::testing {
namespace {

constexpr int32_t kPrefixGranularity = 4;

CacheGroupConfig Full(int32_t granularity = 4, int32_t packing = 1, int32_t shards = 1) {
  CacheGroupConfig group{.group_id = "", .block_granularity = granularity};
  group.cache_blocks_per_lcm_block = packing;
  group.shard_count = shards;
  return group;
}

CacheGroupConfig Window(int32_t window, int32_t granularity = 4, int32_t packing = 1, bool replayable = false) {
  CacheGroupConfig group = Full(granularity, packing);
  group.retention = CacheRetention::kSlidingWindow;
  group.sliding_window_tokens = window;
  group.replayable = replayable;
  return group;
}

CacheGroupConfig State(int32_t granularity = 4, int32_t packing = 1) {
  CacheGroupConfig group = Full(granularity, packing);
  group.family = CacheGroupFamily::kState;
  return group;
}

const std::vector<std::vector<CacheGroupConfig>>& GroupSets() {
  static const std::vector<std::vector<CacheGroupConfig>> sets = {
      {Full()},
      {Full(), Window(4)},
      {Full(2, 3), Window(5), Window(9, 2, 2)},
      {Full(), State()},
      {Window(3), State()},
      {Full(4, 4, 2), Window(3, 1, 2), State(2, 2)},
      {Full(1, 4), State(2, 2), State(1, 4)},
      {Full(), Window(6, 4, 1, true)},
      {Full(4, 2), Window(6), Window(3, 2, 1, true), Window(2, 1, 4, true)},
      {Window(6)},
      {State()},
  };
  return sets;
}

uint64_t IdentityOf(const std::string& salt, const std::string& weights) {
  return std::hash<std::string>()(salt + "\n" + weights);
}

}  // namespace

CallSequence::CallSequence(std::span<const uint8_t> bytes)
    : bytes_(bytes),
      config_(ChooseConfig()),
      scheduler_(config_),
      twin_(config_),
      device_(config_, [this] { return 1 + Below(config_.decode_input_tokens); }) {}

int32_t CallSequence::Below(int32_t bound) {
  if (bytes_.empty()) return 0;
  const int32_t value = bytes_.front() % bound;
  bytes_ = bytes_.subspan(1);
  return value;
}

SchedulerConfig CallSequence::ChooseConfig() {
  SchedulerConfig config;
  config.prefix_granularity = kPrefixGranularity;
  config.cache_groups = GroupSets()[static_cast<std::size_t>(Below(static_cast<int32_t>(GroupSets().size())))];
  const int32_t usable = 4 + Below(40);
  config.num_device_pages = usable + 1;
  int index = 0;
  for (CacheGroupConfig& group : config.cache_groups) {
    group.group_id = "g" + std::to_string(index++);
    group.total_pages = 1 + usable * group.cache_blocks_per_lcm_block;
  }
  const auto replay = static_cast<int32_t>(config.ReplayWindow());
  const int32_t least = replay > 0 ? replay + std::max(replay, kPrefixGranularity) : kPrefixGranularity;
  config.max_scheduled_tokens = least + Below(30);
  config.max_batch_size = 1 + Below(6);
  config.decode_input_tokens = 1 + Below(3);
  constexpr int32_t kSwitches = 32;
  const int32_t choice = Below(8 * kSwitches);
  const int32_t switches = choice % kSwitches;
  config.overlap_schedule_depth = switches & 1;
  config.enable_mixed_prefill_decode = (switches & 2) != 0;
  config.disable_prefix_cache = (switches & 12) == 12;
  config.enable_kv_cache_events = (switches & 16) != 0;
  // Half of all schedulers have a host tier, from one parent to more than the device has.
  if (const int32_t size = choice / kSwitches; size >= 4) config.num_host_pages = 2 + (size - 4) * (size - 4) * 6;
  config.prefix_replay_tokens = Below(3) * 3;
  config.max_overtaken_rounds = Below(4);
  config.max_kv_events = 1 + Below(64);
  return config;
}

void CallSequence::Run() {
  while (!bytes_.empty()) {
    Step();
    Require(Gauges(scheduler_) == Gauges(twin_), "a scheduler that was called wrongly stays as its twin");
  }
  RunOut();
}

void CallSequence::Step() {
  switch (Below(20)) {
    case 0:
    case 1:
    case 2:
      return Submit();
    case 3:
      return EndOne();
    case 4:
      return RetractOne();
    case 5:
      if (Below(3) > 0) return Drain();
      return config_.HasHostCache() && Below(2) == 0 ? ClearDevice() : Clear();
    case 6:
      weight_version_ = std::string(static_cast<std::size_t>(Below(2)), 'w');
      return Both([&](Scheduler& scheduler) { scheduler.SetWeightVersion(weight_version_); });
    case 7:
      return WrongEvent();
    case 8:
      return WrongRows();
    case 9:
      return Below(2) == 0 ? WrongSubmission() : ResultsOfNobody();
    case 10:
    case 11:
      return LandRound();
    case 12:
    case 13:
      return LandOne(/*ends=*/Below(8) == 0);
    case 14:
    case 15:
      if (TakesForcedTokens()) return LandForced();
      return LandOne(/*ends=*/false);
    default:
      return Plan();
  }
}

void CallSequence::Both(const Call& call) {
  call(scheduler_);
  call(twin_);
}

void CallSequence::Submit() {
  std::vector<RequestSpec> specs;
  for (int32_t count = 1 + Below(2); count > 0; --count) {
    RequestSpec spec{.request_id = "r" + std::to_string(Below(10)), .tokens = {}};
    if (live_.contains(spec.request_id) || (!specs.empty() && specs[0].request_id == spec.request_id)) continue;
    // Its finish may not have been reaped.
    if (scheduler_.RequestTokenSize(spec.request_id) >= 0) continue;
    const int32_t shared = Below(24);
    const int32_t prompt = 1 + Below(24);
    for (int32_t i = 0; i < prompt; ++i) spec.tokens.push_back(i < shared ? 0 : Below(2));
    const int32_t stop = 1 + Below(12);
    const int32_t room = stop + config_.decode_input_tokens * (1 + config_.overlap_schedule_depth);
    if (prompt + room > scheduler_.MaxSingleRequestTokens()) continue;
    spec.max_new_tokens = Below(3) > 0 ? room : 0;
    spec.priority = Below(3) - 1;
    spec.cache_salt = Below(4) == 0 ? "salt" : "";
    spec.reads_prefix_cache = Below(8) > 0;
    live_[spec.request_id] = Request{.incarnation = ++incarnations_, .token_size = prompt, .stop_at = prompt + stop};
    device_.Submit(spec.request_id, spec.tokens, IdentityOf(spec.cache_salt, weight_version_));
    specs.push_back(spec);
  }
  Both([&](Scheduler& scheduler) { scheduler.SubmitRequests(specs); });
}

void CallSequence::Plan() {
  const int64_t retractions = scheduler_.NumRetractions();
  const ExecutionPlan plan = scheduler_.NextExecutionPlan();
  CheckSame(plan, twin_.NextExecutionPlan());
  CheckPlan(plan);
  const ForwardBatch& batch = *plan.forward;
  counts_.plans_with_rows += batch.NumRows() > 0 ? 1 : 0;
  counts_.retractions += static_cast<int>(scheduler_.NumRetractions() - retractions);
  for (std::size_t row = 0; row < batch.NumExtends(); ++row) counts_.hits += batch.extend_prefix_lens[row] > 0 ? 1 : 0;
  for (SimulatedDevice::Row& row : device_.Run(plan)) {
    const std::string id = row.id;
    out_[id].push_back(
        Out{.incarnation = live_.at(id).incarnation, .round = plan.round_number, .row = std::move(row)});
  }
  counts_.blocks_loaded = device_.host().blocks_loaded();
  if (!device_.host().UnderWay().empty()) EndCopies(static_cast<std::size_t>(Below(4)));
}

void CallSequence::EndCopies(std::size_t count) {
  std::vector<uint32_t> ids = device_.host().UnderWay();
  ids.resize(std::min(count, ids.size()));
  for (const uint32_t id : ids) {
    const ExecutionEvent event{{device_.host().End(id)}};
    Both([&](Scheduler& scheduler) { scheduler.Advance(event); });
  }
}

bool CallSequence::IsLate(const std::string& id, const Out& out) const {
  const auto entry = live_.find(id);
  return entry == live_.end() || entry->second.incarnation != out.incarnation;
}

std::string CallSequence::AnyLive() {
  if (live_.empty()) return "";
  return std::next(live_.begin(), Below(static_cast<int32_t>(live_.size())))->first;
}

std::vector<SchedulerEvent> CallSequence::ResultOf(const std::string& id, bool names_round) const {
  const Out& out = out_.at(id).front();
  std::vector<SchedulerEvent> events = {ExtendResultEvent{
      .request_id = id, .tokens = out.row.tokens, .round_number = names_round ? out.round : kAnyRound}};
  // A request that has yet to decode has not gone past its prompt's result.
  if (out.row.is_decode && !IsLate(id, out)) {
    events.push_back(UpdateReserveNumTokensEvent{id, static_cast<int32_t>(out.row.tokens.size())});
  }
  return events;
}

void CallSequence::NoteLanding(const std::string& id) {
  std::deque<Out>& rows = out_.at(id);
  const Out out = rows.front();
  rows.pop_front();
  if (rows.empty()) out_.erase(id);
  if (IsLate(id, out)) {
    ++counts_.late_results;
  } else {
    live_.at(id).token_size += static_cast<int32_t>(out.row.tokens.size());
  }
  if (const auto entry = live_.find(id); entry != live_.end()) {
    Require(scheduler_.RequestTokenSize(id) == entry->second.token_size, "a result lands on its own row");
  }
}

void CallSequence::FinishIfDone(const std::string& id) {
  const auto entry = live_.find(id);
  if (entry == live_.end() || entry->second.token_size < entry->second.stop_at) return;
  Both([&](Scheduler& scheduler) { scheduler.Advance(ExecutionEvent{{FinishEvent{id}}}); });
  ++counts_.finished;
  Forget(id);
}

void CallSequence::Forget(const std::string& id) {
  live_.erase(id);
  device_.End(id);
}

void CallSequence::LandOne(bool ends) {
  if (out_.empty()) return;
  const std::string id = std::next(out_.begin(), Below(static_cast<int32_t>(out_.size())))->first;
  ExecutionEvent event{ResultOf(id, /*names_round=*/Below(2) == 0)};
  ends = ends && live_.contains(id);
  if (ends) event.AddEvent(AbortEvent{id});
  Both([&](Scheduler& scheduler) { scheduler.Advance(event); });
  if (ends) {
    out_.at(id).pop_front();
    if (out_.at(id).empty()) out_.erase(id);
    return Forget(id);
  }
  NoteLanding(id);
  FinishIfDone(id);
}

bool CallSequence::TakesForcedTokens() const {
  return config_.enable_mixed_prefill_decode && config_.decode_input_tokens == 1;
}

void CallSequence::LandForced() {
  if (out_.empty()) return;
  const auto& [id, rows] = *std::next(out_.begin(), Below(static_cast<int32_t>(out_.size())));
  const Out& out = rows.front();
  if (IsLate(id, out) || out.row.tokens.empty()) return;
  const int32_t room = scheduler_.MaxSingleRequestTokens() - live_.at(id).token_size - 1;
  std::vector<int32_t> forced;
  for (int32_t count = std::min(1 + Below(9), room); count > 0; --count) forced.push_back(Below(3));
  if (forced.empty()) return;
  const ExecutionEvent event{{ExtendResultEvent{
      .request_id = id, .tokens = out.row.tokens, .round_number = out.round, .forced_tokens = forced}}};
  if (rows.size() > 1) return Refused([&](Scheduler& scheduler) { scheduler.Advance(event); });
  Both([&](Scheduler& scheduler) { scheduler.Advance(event); });
  ++counts_.forced;
  live_.at(id).token_size += static_cast<int32_t>(forced.size());
  live_.at(id).was_forced = true;
  device_.Force(id, forced);
  const std::string landed = id;
  NoteLanding(landed);
  FinishIfDone(landed);
}

void CallSequence::LandRound() {
  if (out_.empty()) return;
  const int64_t round = std::next(out_.begin(), Below(static_cast<int32_t>(out_.size())))->second.front().round;
  const bool with_late = Below(2) == 0;
  std::vector<int32_t> slots, counts, tokens;
  std::vector<std::string> ids;
  for (auto entry = out_.begin(); entry != out_.end();) {
    auto& [id, rows] = *entry++;
    const auto row = std::ranges::find(rows, round, &Out::round);
    if (row == rows.end()) continue;
    const bool late = IsLate(id, *row);
    // Live rows land in order; one that cannot yet stays out and may still land later.
    if (!late && (row != rows.begin() && !IsLate(id, *std::prev(row)))) continue;
    if (!late || with_late) {
      slots.push_back(row->row.slot);
      counts.push_back(static_cast<int32_t>(row->row.tokens.size()));
      tokens.insert(tokens.end(), row->row.tokens.begin(), row->row.tokens.end());
    }
    // The round is closed with this call, so a late row of it is expected no more either way.
    if (row != rows.begin()) std::rotate(rows.begin(), row, std::next(row));
    ids.push_back(id);
  }
  const RowResults results{.slots = slots, .token_counts = counts, .tokens = tokens, .round = round};
  Both([&](Scheduler& scheduler) { scheduler.AdvanceRows(results); });
  for (const std::string& id : ids) NoteLanding(id);
  for (const std::string& id : ids) FinishIfDone(id);
}

void CallSequence::EndOne() {
  const std::string id = AnyLive();
  if (id.empty()) return;
  SchedulerEvent event = AbortEvent{id};
  if (Below(3) == 0) event = FailedEvent{id};
  Both([&](Scheduler& scheduler) { scheduler.Advance(ExecutionEvent{{event}}); });
  Forget(id);
}

// What the executor does when it has not run a forward: no result of the request's rows will come.
void CallSequence::RetractOne() {
  const std::string id = AnyLive();
  const auto rows = out_.find(id);
  if (id.empty() || rows == out_.end()) return;
  if (std::erase_if(rows->second, [&](const Out& out) { return !IsLate(id, out); }) == 0) return;
  if (rows->second.empty()) out_.erase(rows);
  device_.Forget(id, static_cast<std::size_t>(live_.at(id).token_size));
  Both([&](Scheduler& scheduler) { scheduler.Advance(ExecutionEvent{{RetractEvent{id}}}); });
}

void CallSequence::Drain() {
  const std::vector<ResidencyEvent> events = scheduler_.DrainResidencyEvents();
  Require(events.size() == twin_.DrainResidencyEvents().size(), "twins drain the same");
  std::size_t num_stored = 0;
  for (const ResidencyEvent& event : events) {
    if (const auto* stored = std::get_if<BlockStoredEvent>(&event)) {
      Require(published_.insert(stored->block_hashes.at(0)).second, "nothing is stored twice");
      ++num_stored;
    } else {
      const uint64_t removed = std::get<BlockRemovedEvent>(event).block_hashes.at(0);
      Require(published_.erase(removed) == 1, "only the stored is removed");
    }
  }
  Require(num_stored <= static_cast<std::size_t>(config_.max_kv_events), "a drain is bounded");
  Require(scheduler_.DrainResidencyEvents().empty() && twin_.DrainResidencyEvents().empty(), "a second drain is empty");
  counts_.dropped_events = static_cast<int>(scheduler_.DroppedResidencyEvents());
}

void CallSequence::Clear() {
  const bool clearable = scheduler_.CanClearCache();
  Require(scheduler_.ClearCache() == clearable && twin_.ClearCache() == clearable, "a clear does what was said");
  if (!clearable) return;
  Drain();
  Require(published_.empty(), "nothing is published of an empty cache");
  Require(scheduler_.HostCachedBlocks() == 0, "a clear leaves the host nothing");
  device_.host().Clear();
}

void CallSequence::ClearDevice() {
  const int32_t kept = scheduler_.HostCachedBlocks();
  const bool cleared = scheduler_.ClearDeviceCache();
  Require(twin_.ClearDeviceCache() == cleared, "twins clear the same");
  Require(scheduler_.HostCachedBlocks() == kept, "a clear of the device leaves the host alone");
  if (!cleared) return;
  counts_.clears_above_a_host += kept > 0 ? 1 : 0;
  Drain();
  Require(published_.empty(), "nothing is published of an empty device");
}

void CallSequence::RunOut() {
  for (int round = 0; round < 4000 && !live_.empty(); ++round) {
    Plan();
    EndCopies(device_.host().UnderWay().size());
    const std::size_t keep = round % 2 == 0 && config_.overlap_schedule_depth > 0 ? 1 : 0;
    for (const std::string id : {"r0", "r1", "r2", "r3", "r4", "r5", "r6", "r7", "r8", "r9"}) {
      while (out_.contains(id) && out_.at(id).size() > keep) {
        const ExecutionEvent event{ResultOf(id, round % 3 == 0)};
        Both([&](Scheduler& scheduler) { scheduler.Advance(event); });
        NoteLanding(id);
        FinishIfDone(id);
      }
    }
  }
  Require(live_.empty(), "everybody finishes");
  // What the last ones leave may be copied down, which only the next plans tell of.
  for (int round = 0; config_.HasHostCache() && round < 3; ++round) {
    Plan();
    EndCopies(device_.host().UnderWay().size());
  }
  Both([&](Scheduler& scheduler) {
    scheduler.NextExecutionPlan();
    Require(scheduler.WaitingSize() + scheduler.PrefillingSize() + scheduler.DecodingSize() == 0, "nobody is left");
    Require(scheduler.ActiveLcmBlocks() == 0, "nothing is held");
    Require(scheduler.AvailableLcmBlocks() == config_.num_device_pages - 1, "everything is available");
  });
  Clear();
  Require(scheduler_.EmptyLcmBlocks() == config_.num_device_pages - 1, "everything has come back");
}

void CallSequence::CheckPlan(const ExecutionPlan& plan) const {
  const ForwardBatch& batch = *plan.forward;
  const std::size_t extends = batch.NumExtends();
  const std::set<std::string> ids(batch.request_ids.begin(), batch.request_ids.end());
  const std::set<int32_t> slots(batch.request_pool_indices.begin(), batch.request_pool_indices.end());
  Require(ids.size() == batch.NumRows() && slots.size() == batch.NumRows(), "a plan has a request and a slot once");
  Require(slots.empty() || (*slots.begin() >= 1 && *slots.rbegin() <= config_.max_batch_size), "slots are in range");
  Require(batch.NumRows() <= static_cast<std::size_t>(config_.max_batch_size), "rows are in the limit");
  int64_t inputs = 0;
  for (const int32_t length : batch.input_lengths) inputs += length;
  Require(inputs <= config_.max_scheduled_tokens, "inputs are in the budget");
  for (std::size_t row = 0; row < batch.NumRows(); ++row) {
    if (row >= extends) {
      Require(batch.input_lengths[row] == config_.decode_input_tokens, "a decode row has its width");
      continue;
    }
    const int32_t end = batch.extend_prefix_lens[row] + batch.input_lengths[row];
    const bool may_be_output = live_.at(batch.request_ids[row]).was_forced;
    Require(end == batch.prefill_lengths[row] || row + 1 == extends || may_be_output,
            "of the prompts only the last chunk is truncated");
    const int32_t hit = batch.extend_prefix_lens[row] + batch.extend_replay_lens[row];
    Require(batch.extend_replay_lens[row] == 0 || hit % config_.prefix_granularity == 0, "a replay ends at its hit");
  }
  CheckTables(batch);
}

void CallSequence::CheckTables(const ForwardBatch& batch) const {
  for (const CacheGroupConfig& group : config_.cache_groups) {
    const auto grid = batch.block_tables.find(group.group_id);
    if (grid == batch.block_tables.end()) continue;
    for (std::size_t row = 0; row < grid->second.rows; ++row) {
      std::set<int32_t> seen;
      bool padded = false;
      for (const int32_t id : grid->second.Row(row)) {
        Require(id >= -1 && id < group.total_pages, "block ids are in range");
        Require(id == -1 || !padded, "padding stands on the right");
        padded = padded || id == -1;
        Require(id <= 0 || seen.insert(id).second, "a table has a block once");
      }
    }
  }
}

void CallSequence::CheckSame(const ExecutionPlan& plan, const ExecutionPlan& other) const {
  const ForwardBatch& batch = *plan.forward;
  const ForwardBatch& twin = *other.forward;
  const auto same = [](const auto& a, const auto& b) { Require(a == b, "twins plan the same"); };
  same(plan.round_number, other.round_number);
  same(plan.pages_to_zero, other.pages_to_zero);
  same(plan.write_back ? plan.write_back->dst_pages : std::vector<std::vector<int32_t>>(),
       other.write_back ? other.write_back->dst_pages : std::vector<std::vector<int32_t>>());
  same(plan.load_back ? plan.load_back->dst_pages : std::vector<std::vector<int32_t>>(),
       other.load_back ? other.load_back->dst_pages : std::vector<std::vector<int32_t>>());
  same(batch.request_ids, twin.request_ids);
  same(batch.request_pool_indices, twin.request_pool_indices);
  same(batch.input_lengths, twin.input_lengths);
  same(batch.input_ids, twin.input_ids);
  same(batch.extend_prefix_lens, twin.extend_prefix_lens);
  same(batch.extend_replay_lens, twin.extend_replay_lens);
  for (const CacheGroupConfig& group : config_.cache_groups) {
    if (batch.NumRows() > 0) same(batch.block_tables.at(group.group_id).ids, twin.block_tables.at(group.group_id).ids);
  }
}

std::vector<int64_t> CallSequence::Gauges(const Scheduler& scheduler) const {
  std::vector<int64_t> gauges = {scheduler.WaitingSize(),        scheduler.PrefillingSize(),
                                 scheduler.DecodingSize(),       scheduler.NumRetractions(),
                                 scheduler.EmptyLcmBlocks(),     scheduler.ActiveLcmBlocks(),
                                 scheduler.AvailableLcmBlocks(), scheduler.CanClearCache() ? 1 : 0,
                                 scheduler.DroppedResidencyEvents(), scheduler.HostCachedBlocks(),
                                 scheduler.HostPinnedBlocks(),   scheduler.HostEmptyLcmBlocks()};
  for (const CacheGroupConfig& group : config_.cache_groups) {
    gauges.push_back(scheduler.GroupAvailablePages(group.group_id));
    gauges.push_back(scheduler.GroupHitTokens(group.group_id));
  }
  for (int id = 0; id < 10; ++id) gauges.push_back(scheduler.RequestTokenSize("r" + std::to_string(id)));
  return gauges;
}

}  // namespace tokenspeed::testing
